"""The default inference server: SGLang's HTTP protocol over a small continuous-batching loop, on CPU or one GPU.

1. It answers like SGLang 0.5.23; `tests/conformance/sglang` replays exchanges and lists intended differences.
2. Layers, lowest first: `attention`, `sampling` and `stopping`, `core`, `worker`, `request` and `results`, `weights`,
   `service`, `generate` and `control`, `server`. Each imports only earlier layers, `http` and `errors`."""
