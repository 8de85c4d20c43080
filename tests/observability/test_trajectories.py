"""Trajectories as people see them: every token once, in parts, with its engine weights and its training data."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from agentrl.errors import DataError
from agentrl.media import Image, ImageSpan
from agentrl.observability.report import templates
from agentrl.observability.trajectories import LONG, describe_sample, id_texts, run_texts, split_texts
from agentrl.sample import Origin, Sample
from tests.support.viewed import write_tokenizer
from tests.support.vision import picture

TEXTS = ["<system>", "be good", "<user>", "What", " is it?", "<call>", "</call>", "\n", "42"]


def texts(ids: Sequence[int]) -> list[str]:
    return [TEXTS[i] for i in ids]


def two_turns(shown: int = 1) -> Sample:
    sample = Sample(prompt=[{"role": "system", "content": "be good"}, {"role": "user", "content": " What is it?\n"}])
    sample.set_prompt_tokens([0, 1, 2, 3, 4])
    sample.append_model([5, 6], [-0.5, -2.0], "3", turn=1)
    sample.append_observation([7], turn=1, origin=Origin.CLOSE)
    sample.append_observation([8] * shown, turn=1)
    sample.append_model([8], [-0.1], [("3", 0, 1)], turn=2)
    call = {"type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    sample.metadata = {
        "step_rewards": [0.5, None],
        "generate_seconds": [1.5, 0.25],
        "step_seconds": [0.125],
        "messages": [
            *sample.prompt,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "42"},
        ],
    }
    return sample


def test_parts_are_the_turns_and_joined_the_tokens() -> None:
    sample = two_turns()
    shown = describe_sample(sample, texts)
    assert [(p.kind, p.turn, p.title, len(p.tokens)) for p in shown.parts] == [
        ("prompt", 0, "system prompt, tools, earlier messages", 3),
        ("prompt", 0, "prompt", 2),
        ("model", 1, "turn 1 · calls look_up", 3),
        ("env", 1, "shown to the model", 1),
        ("model", 2, "turn 2", 1),
    ]
    assert [p.reward for p in shown.parts] == [None, None, 0.5, None, None]
    assert [p.seconds for p in shown.parts] == [None, None, 1.5, 0.125, 0.25]
    assert "".join(t.text.replace("↵", "") for t in shown.tokens) == "".join(texts(sample.tokens))


@pytest.mark.parametrize("name", ["step_rewards", "generate_seconds", "step_seconds"])
@pytest.mark.parametrize("value", [5, ["much"]])
def test_metadata_of_user_code_that_is_no_list_of_numbers_is_left_out(name: str, value: object) -> None:
    sample = two_turns()
    sample.metadata |= {name: value}
    parts = describe_sample(sample, texts).parts
    seconds = [part.seconds for part in parts if part.seconds is not None]
    rewards = [part.reward for part in parts if part.reward is not None]
    assert rewards == ([] if name == "step_rewards" else [0.5])
    assert seconds == {"generate_seconds": [0.125], "step_seconds": [1.5, 0.25]}.get(name, [1.5, 0.125, 0.25])


def test_characters_that_hide_or_turn_text_are_named() -> None:
    """Otherwise a model could show a reader another order of its tokens than the trained one."""
    hidden = ["a\u202eb", "\u2066\u2062\U000e0041\u3164", "\u200b", "é 好 \U0001f600"]
    shown = describe_sample(two_turns(), lambda ids: [hidden[at % 4] for at in range(len(ids))])
    assert [token.shown for token in shown.tokens[:4]] == [
        *("a⟨U+202E⟩b", "⟨U+2066⟩⟨U+2062⟩⟨U+E0041⟩⟨U+3164⟩", "⟨U+200B⟩", hidden[3])
    ]
    assert "⟨U+202E⟩" in shown.parts[0].preview
    macros: Any = templates("observability").get_template("trajectory.html").module
    page = "".join(macros.tokens_of(part) for part in shown.parts)
    assert "⟨U+202E⟩" in page
    assert not any(character in page for character in "\u202e\u2066\u200b")


def test_texts_of_tokens_join_to_the_decoded_text() -> None:
    """As in Llama 2, where the decoder removes a space at the beginning."""
    tokenizer = Tokenizer(BPE({"▁The": 0, "▁capital": 1, "s": 2, "<0xE5>": 3, "<0xA5>": 4, "<0xBD>": 5, "▁": 6}, []))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = [0, 1, 2, 6, 3, 4, 5, 1, 2]
    found = split_texts(ids, tokenizer.decode)
    assert found == ["The", " capital", "s", " ", "", "", "好", " capital", "s"]
    assert "".join(found) == tokenizer.decode(ids)


@pytest.mark.parametrize("shown", [LONG - 1, LONG])
def test_what_comes_before_and_long_answers_are_folded(shown: int) -> None:
    parts = describe_sample(two_turns(shown), texts).parts
    assert [p.folded for p in parts] == [True, False, False, shown >= LONG, False]
    assert parts[0].preview == "<system>be good<user>"
    assert len(parts[3].preview) == 90


def test_a_token_tells_both_log_probs_its_advantage_and_its_weights() -> None:
    trained = {"log_probs": [-0.25, math.nan, 0.0, 0.0, 0.0], "advantages": [0.75, math.nan, 0.0, 0.0, 0.0]}
    tokens = describe_sample(two_turns(), texts, trained).tokens
    assert (
        tokens[5].note == "model · id 5 · log-prob -0.500 (p 60.7%) · in training -0.250 · advantage +0.750 · weights 3"
    )
    assert tokens[6].note == "model · id 6 · log-prob -2.000 (p 13.5%) · weights 3"
    assert tokens[8].note == "env · id 8"
    assert [t.unsure for t in tokens[5:7]] == [False, True]


def test_numbers_of_another_length_are_refused() -> None:
    with pytest.raises(DataError, match="expected 5 log-probs"):
        describe_sample(two_turns(), texts, {"log_probs": [0.0], "advantages": [0.0]})


def test_a_prompt_that_is_not_found_stays_whole() -> None:
    sample = Sample(prompt="unlike its tokens")
    sample.set_prompt_tokens([0, 1])
    assert [(p.title, p.folded) for p in describe_sample(sample, texts).parts] == [("prompt", False)]


def test_calls_of_another_shape_are_no_titles() -> None:
    sample = two_turns()
    sample.metadata["messages"][2]["tool_calls"] = [None, {"function": "x"}, 3]
    assert describe_sample(sample, texts).parts[2].title == "turn 1"


def test_an_image_stands_in_place_of_its_placeholders() -> None:
    sample = two_turns(shown=LONG)
    image = Image.from_bytes(picture(30, 20))
    sample.images = {image.hash: image}
    at = sample.prompt_length + 4
    sample.image_spans = [ImageSpan(image.hash, 1, 3), ImageSpan(image.hash, at, at + 2)]
    shown = describe_sample(sample.validate(), texts)
    tokens = shown.tokens
    assert [token.image for token in tokens[:4]] == ["", image.url, "", ""]
    assert tokens[1].text == tokens[2].text == ""
    assert tokens[2].note == "prompt · image of 30 x 20 pixels, 2 tokens"
    answer = next(part for part in shown.parts if part.kind == "env")
    assert not answer.folded


def test_a_model_is_where_it_was_when_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, elsewhere = tmp_path / "here" / "run", tmp_path / "elsewhere"
    run.mkdir(parents=True)
    write_tokenizer(elsewhere / "start")
    monkeypatch.chdir(elsewhere)
    relative = {"train": {"hf_checkpoint": "./start"}}
    assert run_texts(run, relative) is id_texts, "another model with the same relative path"
    absolute = {"train": {"hf_checkpoint": str(elsewhere / "start")}}
    assert run_texts(run, absolute)([1]) == ["What"]
    (run / "hf_checkpoint.txt").write_text(f"{elsewhere / 'start'}\n")
    monkeypatch.chdir(tmp_path)
    assert run_texts(run, relative)([1]) == ["What"]
