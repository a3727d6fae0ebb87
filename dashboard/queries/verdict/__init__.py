"""How a run does, in words: facts read off the run ─► clauses, each green, amber or red ─► one piece of advice."""
