"""How far generators may run ahead, and what follows when training collapses: decided by what a run measures."""
