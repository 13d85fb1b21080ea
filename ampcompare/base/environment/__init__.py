"""What this machine offers, each answer with its reason, by files and metadata alone: no torch, no Apex is imported."""
