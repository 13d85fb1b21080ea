"""What is left over once Apex is gone: imports, help texts, and branches that became equal."""
