"""What is installed and whether it works, and where a sampling step's time goes."""
