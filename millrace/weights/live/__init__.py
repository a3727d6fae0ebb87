"""Weights from the trainer's ranks straight into vLLM's workers, by vLLM's own weight transfer engines.

sync_weights   leads, as for `direct`: version, members, deadline (direct/relay.py, rendezvous.py)
                   ▲                                          ▲
trainer ranks  trainer.py: vLLM's trainer engine ──calls──► calls.py ──► generator: pause, serve, resume
                   └══ ipc, nccl, nccl_m2n, gloo ═══════════════════════════► vLLM's worker engine (engines/vllm)
"""
