"""What arguments may be."""
