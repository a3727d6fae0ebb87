"""Names of the metrics of what a stage uses, for those who write and who read them."""

USAGE = "usage/"
"""Their prefix."""
CPU_CORES = f"{USAGE}cpu_cores"
MEMORY_BYTES = f"{USAGE}memory_bytes"
