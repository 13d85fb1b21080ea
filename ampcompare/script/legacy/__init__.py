"""Let scripts that no one ported run with the torch and the machine of today."""
