"""What an arm does to numbers: from tables, without torch, and as seen on a model that was really prepared."""
