"""Reinforcement learning of coding agents where they really work."""
