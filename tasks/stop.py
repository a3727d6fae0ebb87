"""The one switch that ends every stage of this process's campaign.

It lives in a module of its own because Prefect pickles a served flow by value: an Event among the flow's own globals
could not travel, while a module is imported anew where the flow runs.
"""

import threading

STOP = threading.Event()
"""Set by the flow when the campaign is over, cancelled or broken; supervisors then drain their stage."""
