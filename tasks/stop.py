"""The switch that ends every stage of this process's campaign.

It has its own module because Prefect pickles a served flow by value. An Event among its globals can't be pickled; a
module is imported again.
"""

import threading

STOP = threading.Event()
"""Set by the flow when the campaign ends for any reason. Supervisors then drain their stage."""
