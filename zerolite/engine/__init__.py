"""What a user touches, and what is built from the config behind it."""
