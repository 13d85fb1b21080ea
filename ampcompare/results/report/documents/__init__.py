"""What each kind of result becomes before it has a format: a document, and what a table says of its arms."""
