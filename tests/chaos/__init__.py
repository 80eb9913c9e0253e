"""Real workers that are killed, stopped and broken at random under load, and what must hold all the same."""
