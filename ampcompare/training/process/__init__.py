"""The process that trains: its device, the switches of torch that hold for all of it, and its process group."""
