"""The switches that end every stage of this process's campaign.

They have their own module because Prefect pickles a served flow by value. An Event among its globals can't be pickled;
a module is imported again.
"""

import threading

STOP = threading.Event()
"""Set by the flow when the campaign ends for any reason. Supervisors then drain their stage."""
STOP_NOW = threading.Event()
"""Set when a person asks a second time. Supervisors then kill their stage, whatever it has not committed."""
