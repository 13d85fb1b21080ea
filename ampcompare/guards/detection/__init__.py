"""What guards stand on: what a detector knows of the script that it watches, and how it tells a mistake."""
