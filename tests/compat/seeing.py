# mypy: ignore-errors
"""A function with images as people write them for slime: an image in the prompt, and another one after the first turn."""

import torch
from PIL import Image
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as generate_once
from slime.utils.http_utils import post
from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine
from slime.utils.types import Sample


async def generate(args, sample, sampling_params):
    sample = await generate_once(args, sample, dict(sampling_params))
    state = GenerateState(args)
    (first,) = sample.multimodal_inputs["images"]
    assert isinstance(first, Image.Image)
    second = first.convert("L").resize((64, 128))
    shown = state.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And now?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    made = state.processor(text=shown, **build_processor_kwargs({"images": [second]}))
    sample.append_response_tokens(args, tokens=made["input_ids"][0], log_probs=[0.0] * len(made["input_ids"][0]),
                                  trainable=False, text=shown)  # fmt: skip
    sample.multimodal_inputs["images"].append(second)
    assert sample.multimodal_train_inputs.keys() == {"pixel_values", "image_grid_thw"}
    for name, value in sample.multimodal_train_inputs.items():
        sample.multimodal_train_inputs[name] = torch.cat([value, made[name]])
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    payload["image_data"] = [encode_image_for_rollout_engine(image) for image in sample.multimodal_inputs["images"]]
    output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    ids, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
    sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, meta_info=output["meta_info"])
    sample.status = Sample.Status.COMPLETED
    return sample


async def reward(args, sample, **kwargs):
    first, second = sample.multimodal_inputs["images"]
    assert second.size == (64, 128)
    return first.width
