"""The user's reward functions, in processes where they ask for it."""
