"""Where the time of a step goes: recorded by the stages of one short campaign, and shown as a table."""
