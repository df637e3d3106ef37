"""The engine: its methods for users, and its construction from config and model."""
