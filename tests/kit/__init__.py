"""Doubles and players that tests share. Each is tested here too."""
