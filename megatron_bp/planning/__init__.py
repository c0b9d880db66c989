"""Plans and predicts runs from shapes and measured speeds, before any process starts."""
