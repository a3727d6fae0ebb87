"""The transport `direct`: the trainer's shards go straight to the generators; sync_weights only leads.

sync_weights   control.py: takes offers, announces a push, decides who takes part, compares sums
                   ▲ rendezvous.py ▼
trainer rank   trainer.py: snapshot of its own shards ═══ exchange.py over group.py ═══► generator.py: receive buffer
"""
