"""The default inference server: SGLang's HTTP protocol over a small continuous-batching loop, on CPU or one GPU.

1. Start it with `agentrl serve DIR --port N`; `engine/local.py` has it without a server.
2. It answers as SGLang 0.5.23 answers. `tests/conformance/sglang` replays recorded exchanges of the real server
   and holds the table of every intended difference.
3. Layers, lowest first: `attention` (KV slots), `sampling` and `stopping` (one request's maths), `core` (the batching
   state machine), `worker` (the thread that owns it), `request` and `results` (wire in, wire out), `weights`,
   `service` (what all endpoints share), `generate`, `openai` and `control` (the endpoints), `server`. Each imports only
   those before it, and the helpers `http` and `errors`.
"""
