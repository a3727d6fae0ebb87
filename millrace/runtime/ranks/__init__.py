"""How the ranks of a trainer are started, watched and ended, on a single host or on several."""
