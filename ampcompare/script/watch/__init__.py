"""What only looks at the steps of a script: facts of its cell, the ledger of types, and what shows them to a watch."""
