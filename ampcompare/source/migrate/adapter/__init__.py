"""Put Apex's functions on torch.autocast into one file next to a project, and change the imports of the project."""
