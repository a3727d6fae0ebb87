"""The transport `direct`: the trainer's shards go straight to the generators; sync_weights only leads.

sync_weights   relay.py: learns of versions, announces a push, decides who takes part
                   ▲ rendezvous.py ▼
trainer rank   sender.py: snapshot of its shards ═══ exchange.py ═══► receiver.py: generator 0 ═══► generator 1 ═══► …
"""
