"""The verdict on a run: facts ─► clauses, each green, amber or red ─► one piece of advice."""
