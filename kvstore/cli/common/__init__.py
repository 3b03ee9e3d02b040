"""What several commands share. Not commands themselves."""
