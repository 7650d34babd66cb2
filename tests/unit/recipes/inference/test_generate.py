"""Generated text: the same with and without a cache, repeatable, and written as in training."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import import_libraries
from recipe_texts import small_tokenizer
from trained_models import TOKENIZER, model_folder, open_plain, run_folder

from loopwright.errors import ConfigError
from loopwright.recipes.inference.chat import ChatSettings, Conversation, chat
from loopwright.recipes.inference.generate import GenerateSettings, generate
from loopwright.recipes.inference.model import InferenceSettings, open_any
from loopwright.recipes.inference.prompts import end_tokens, find_prompt_style, render_prompt
from loopwright.recipes.inference.sampling import Sampling, TextPieces, sample

# Any in this file: transformers, which has no types here.

PROMPT = [5, 17, 80, 33, 250]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_libraries()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("base") / "llama")


def opened(folder: Path) -> Any:
    return open_any(InferenceSettings(folder, device="cpu"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_tokens_are_the_same_with_and_without_a_cache(family: str, tmp_path: Path) -> None:
    model = opened(model_folder(tmp_path / family, family))
    for temperature in (0.0, 1.0):
        found = [
            sample(model, PROMPT, Sampling(24, temperature, seed=3, use_cache=use_cache)).ids
            for use_cache in (True, False)
        ]
        assert found[0] == found[1]
        assert len(found[0]) > 5


def test_greedy_tokens_are_those_of_a_loop_by_hand(base: Path) -> None:
    model = open_plain(base)
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(16):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == 0:
                break
    assert sample(opened(base), PROMPT, Sampling(16, 0.0)).ids == ids[len(PROMPT) :]


def test_sampled_tokens_follow_the_filtered_distribution(base: Path) -> None:
    model = opened(base)
    logits = open_plain(base)(input_ids=torch.tensor([PROMPT])).logits[0, -1] / 0.7
    kept = logits.topk(3)
    found = {sample(model, PROMPT, Sampling(1, 0.7, top_k=3, seed=seed)).ids[0] for seed in range(40)}
    assert found == set(kept.indices.tolist())
    best = {sample(model, PROMPT, Sampling(1, 0.7, top_k=None, top_p=1e-6, seed=seed)).ids[0] for seed in range(5)}
    assert best == {int(logits.argmax())}


def test_a_seed_repeats_the_text_and_leaves_the_generator_alone(base: Path) -> None:
    model = opened(base)
    before = torch.random.get_rng_state()
    first, again, other = (sample(model, PROMPT, Sampling(12, 1.0, seed=seed)).ids for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), before)
    unseeded = [sample(model, PROMPT, Sampling(12, 1.0)).ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_own_sampling_of_the_model_is_not_used(base: Path, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    folder = model_folder(tmp_path / "b")
    GenerationConfig(
        do_sample=True, temperature=3.0, top_k=7, repetition_penalty=5.0, no_repeat_ngram_size=1, eos_token_id=0
    ).save_pretrained(folder)
    for sampling in (Sampling(24, 0.0), Sampling(24, 1.0, seed=1)):
        assert sample(opened(folder), PROMPT, sampling).ids == sample(opened(base), PROMPT, sampling).ids


def test_an_answer_ends_with_an_end_token(base: Path) -> None:
    model = opened(base)
    with torch.no_grad():
        model.model.get_output_embeddings().weight.zero_()
    # All logits are equal now, so that the end token, 0, is the first of the best.
    answer = sample(model, PROMPT, Sampling(9, 0.0))
    assert (answer.ids, answer.text, answer.stopped_by) == ([0], "", "end")


def test_pieces_of_text_join_to_the_text_and_hold_no_half_characters() -> None:
    tokenizer = small_tokenizer()
    text = " Grüße, 世界! the quick brown fox 🦊"
    ids = tokenizer(text)["input_ids"]
    written: list[str] = []
    pieces = TextPieces(tokenizer, written.append)
    for one in ids:
        pieces.add([one])
    pieces.finish()
    assert "".join(written) == pieces.text == text
    assert len(written) > 5
    assert not any("\ufffd" in one for one in written)


def test_bytes_that_make_no_character_are_written_at_the_end() -> None:
    tokenizer = small_tokenizer()
    pieces = TextPieces(tokenizer)
    for one in tokenizer("a世")["input_ids"][:-1]:
        pieces.add([one])
    assert pieces.text == "a"
    pieces.finish()
    assert pieces.text == "a\ufffd"


def test_generate_streams_what_it_reports(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = generate(GenerateSettings(base, prompt="the quick", max_new_tokens=12, temperature=0, device="cpu"))
    assert capsys.readouterr().out == report.text + "\n"
    assert report.prompt_style == "chat"
    assert report.new_tokens == 12
    assert "12 tokens" in report.describe()
    silent = generate(
        GenerateSettings(base, prompt="the quick", max_new_tokens=12, temperature=0, device="cpu", stream=False)
    )
    assert capsys.readouterr().out == ""
    assert silent.text == report.text
    assert json.loads(json.dumps(report.as_dict()))["stopped_by"] == "length"


def test_messages_are_a_prompt_of_their_own(base: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "the quick"}]
    (tmp_path / "m.json").write_text(json.dumps({"messages": messages}))
    shared: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "stream": False}
    first = generate(GenerateSettings(base, prompt="the quick", **shared))
    assert generate(GenerateSettings(base, messages=messages, **shared)).text == first.text
    assert generate(GenerateSettings(base, messages=tmp_path / "m.json", **shared)).text == first.text


def test_prompts_are_written_as_in_training(base: Path, tmp_path: Path) -> None:
    model = opened(base)
    tokenizer = model.tokenizer

    def text(style: str, **options: Any) -> str:
        return str(tokenizer.decode(render_prompt("the fox", style, tokenizer, **options)))

    assert text("chat") == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert text("chat", system="S").startswith("<|im_start|>system\nS<|im_end|>\n")
    assert text("text") == "the fox"
    assert text("alpaca") == "### Instruction:\nthe fox\n\n### Response:\n"
    assert text("Q: {prompt}\nA: ") == "Q: the fox\nA: "
    with pytest.raises(ConfigError, match="system: Expected prompt_style=chat"):
        text("text", system="S")
    with pytest.raises(ConfigError, match="prompt_style: Expected auto, chat, text, alpaca"):
        find_prompt_style("alpaka", model.location, tokenizer)
    (tmp_path / "recipe.json").write_text('{"settings": {"prompt_style": "alpaca"}}')
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert find_prompt_style("auto", opened(tmp_path).location, tokenizer) == "alpaca"


def test_a_text_gets_the_first_token_of_the_tokenizer_once() -> None:
    tokenizer = small_tokenizer(special=("<|im_end|>", "<s>"), begin="<s>")
    assert tokenizer.convert_ids_to_tokens(render_prompt("the", "text", tokenizer)) == ["<s>", "the"]


def test_the_end_of_a_turn_in_the_template_ends_an_answer(base: Path) -> None:
    tokenizer = small_tokenizer(special=("<|end|>", "<|im_end|>", "<|im_start|>"), end="<|end|>")
    assert end_tokens(open_plain(base), tokenizer) == [0, 1]


def test_a_prompt_beyond_the_context_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"Expected fewer tokens than the model's 128 positions, got \d+\."):
        generate(GenerateSettings(base, prompt="the quick brown fox " * 40, max_new_tokens=1))


def test_an_answer_ends_with_the_context(base: Path) -> None:
    model = opened(base)
    prompts = ([5] * 119 + [last] for last in range(10, 100))
    answers = (sample(model, prompt, Sampling(1000, temperature=0)) for prompt in prompts)
    answer = next(one for one in answers if one.stopped_by != "end")
    assert (len(answer.ids), answer.stopped_by) == (8, "context")
    assert sample(model, [5] * 119, Sampling(2, temperature=0)).stopped_by in ("length", "end")


def test_all_problems_are_named_at_once(base: Path) -> None:
    wrong = GenerateSettings(
        base,
        max_new_tokens=0,
        temperature=-1,
        top_k=0,
        top_p=0,
        quantize="nf5",
        dtype="half",
        prompt="a",
        messages=base,
    )
    with pytest.raises(ConfigError) as error:
        generate(wrong)
    names = ["dtype", "quantize", "max_new_tokens", "temperature", "top_k", "top_p", "prompt"]
    assert [line.strip().partition(":")[0] for line in error.value.what.splitlines()[1:]] == names
    assert "did you mean 'nf4'" in error.value.what


@pytest.mark.parametrize("device", ["cuda:99", "meta", "quantum"])
def test_a_device_that_the_machine_does_not_have_is_named(base: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device: Expected a device of .*, got '{device}'"):
        generate(GenerateSettings(base, prompt="a", device=device))


def test_an_adapter_a_run_and_a_checkpoint_are_one_model(base: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", base)
    shared: dict[str, Any] = {"prompt": "Question", "max_new_tokens": 10, "temperature": 0, "stream": False}
    from loopwright.recipes.exporting.export import export_run

    of_run = generate(GenerateSettings(run, **shared)).text
    of_file = generate(GenerateSettings(run / "checkpoints" / "last.ckpt", **shared)).text
    export_run(run, run / "model")
    of_adapter = generate(GenerateSettings(run / "model", **shared)).text
    of_result = generate(GenerateSettings(run, **shared)).text
    assert of_run == of_file == of_adapter == of_result != generate(GenerateSettings(base, **shared)).text


def lines(*texts: str) -> io.StringIO:
    return io.StringIO("".join(f"{text}\n" for text in texts))


def test_a_chat_from_a_pipe_is_a_readable_transcript(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", lines("the fox", "", "/help", "/reset", "a dog", "/exit", "not read"))
    report = chat(ChatSettings(base, max_new_tokens=5, temperature=0, device="cpu"))
    out = capsys.readouterr().out
    assert "You: the fox\nModel: " in out
    assert "(new conversation)" in out
    assert "not read" not in out
    assert report.answers == 2
    assert [one["role"] for one in report.messages] == ["user", "assistant"]
    assert report.messages[0]["content"] == "a dog"
    assert report.messages[1]["content"] in out


def test_a_chat_ends_with_its_input(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", lines("the fox"))
    assert chat(ChatSettings(base, max_new_tokens=3, temperature=0)).answers == 1


def test_answers_depend_on_the_conversation(base: Path) -> None:
    model = opened(base)
    settings = ChatSettings(base, max_new_tokens=6, temperature=0)
    written: list[str] = []
    talk = Conversation(model, settings, written.append)
    talk.say("the fox")
    second = talk.say("a dog")
    prompt = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": talk.messages[1]["content"]},
        {"role": "user", "content": "a dog"},
    ]
    expected = generate(
        GenerateSettings(base, messages=prompt, max_new_tokens=6, temperature=0, stream=False, device="cpu")
    )
    assert second == expected.text
    talk.reset()
    assert talk.say("a dog") != second


def test_a_long_conversation_loses_its_first_messages(base: Path) -> None:
    written: list[str] = []
    talk = Conversation(opened(base), ChatSettings(base, max_new_tokens=30, temperature=0), written.append)
    for number in range(4):
        talk.say(f"the quick brown fox {number}")
    assert any("first messages are left out" in one for one in written)
    assert talk.messages[-2]["content"] == "the quick brown fox 3"
    with pytest.raises(ConfigError, match="128 positions"):
        talk.say("word " * 60)
    assert talk.messages[-2]["content"] == "the quick brown fox 3"


def test_a_chat_with_a_short_context_answers_by_default(base: Path) -> None:
    settings = ChatSettings(base, seed=0)
    assert settings.max_new_tokens > 128  # more than the model has positions
    talk = Conversation(opened(base), settings, lambda text: None)
    assert talk.say("the fox")
    talk.say("a dog")  # the first answer may have taken all of the context
    assert talk.answers == 2
    assert talk.messages[-2] == {"role": "user", "content": "a dog"}


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "b", template=None)
    with pytest.raises(ConfigError, match="Expected a tokenizer with a chat template"):
        chat(ChatSettings(folder))
    assert find_prompt_style("auto", opened(folder).location, opened(folder).tokenizer) == "text"
    assert TOKENIZER == 400
