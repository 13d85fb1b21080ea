"""The adapter, one file with Apex's functions on torch.autocast next to a project: when it is taken, and how."""
