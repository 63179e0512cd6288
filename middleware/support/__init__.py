"""What several stock middleware share."""
