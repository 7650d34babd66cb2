"""What one rank of many does, counted in one process: its peers are simulated."""
