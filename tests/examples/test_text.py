"""Sentences of a text: which sentences are questions, and how much of the text a prompt shows."""

import json

from support.refusal import check_row, refused, refused_row

from jaxrl_llm.config import PromptsConfig
from jaxrl_llm.questions import tasks
from jaxrl_llm.scoring import judges

TEXT = 'It rained all day. "Shall we go?" No.\nThe dog slept by the fire! Nobody came to the door that night.'
HOW = "Think about it, then write it as <answer>..</answer>."


def load(path, *, size=0, lines=(json.dumps({"text": TEXT}),), bad_row="error", **arguments):
    path.write_text("\n".join(lines))
    config = PromptsConfig(source="text", name=str(path), size=size, bad_row=bad_row, arguments=arguments)
    return tasks.load(config, seed=0)


def test_each_sentence_is_asked_for_by_those_before_it(tmp_path):
    loaded = load(tmp_path / "t.jsonl", context=2).examples
    assert [example.columns["answer"] for example in loaded] == [  # "Shall we go?" and "No." are too short
        "The dog slept by the fire!",
        "Nobody came to the door that night.",
    ]
    first, second = (example.prompt for example in loaded)
    assert [example.columns["following"] for example in loaded] == ["Nobody came to the door that night.", ""]
    assert first == f'"Shall we go?" No.\n\nWhich sentence comes next? {HOW}'
    assert second == f"No. The dog slept by the fire!\n\nWhich sentence comes next? {HOW}"
    (between,) = load(tmp_path / "t.jsonl", middle=True).examples
    assert between.columns["answer"] == "The dog slept by the fire!"
    assert between.columns["following"] == "Nobody came to the door that night."
    end = f"[...] Nobody came to the door that night.\n\nWhich sentence stands at [...]? {HOW}"
    assert between.prompt == f'It rained all day. "Shall we go?" No. {end}'
    assert (
        len(load(tmp_path / "t.jsonl", words=2).examples) == 3 and len(load(tmp_path / "t.jsonl", size=1).examples) == 1
    )


def test_lines_without_a_text_are_told_with_their_place(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = (json.dumps({"text": TEXT}), "{", json.dumps({"prompt": "a"}))
    with refused_row("t.jsonl", 2, "JSON"):
        load(path, lines=lines)
    loaded = load(path, lines=lines, bad_row="skip")
    assert len(loaded.examples) == 2
    check_row(loaded.bad_rows[1], path, 3, "`text`")
    with refused("prompts.name", str(path)):
        load(path, lines=[json.dumps({"text": "One sentence."})])
    with refused("prompts.arguments.words", 0):
        load(path, words=0)


def test_a_judge_is_shown_so_many_sentences_more(tmp_path):
    text = json.dumps({"text": "It began. " + " ".join(f"And then came part {i}." for i in range(6))})
    parts = [f"And then came part {i}." for i in range(6)]
    load_examples = lambda **arguments: load(tmp_path / "t.jsonl", lines=[text], **arguments).examples
    for given, most in (({}, 3), ({"following": 1}, 1), ({"following": 0}, 0), ({"following": 9}, 9)):
        found = [(x.columns["answer"], x.columns["following"]) for x in load_examples(**given)]
        assert found == [(parts[i], " ".join(parts[i + 1 : i + 1 + most])) for i in range(6)]


def test_a_judge_says_whether_a_guess_means_the_sentence(monkeypatch):
    said = {"cat": "They agree. Yes", "dog": "no, yes? No.", "cow": "who knows"}
    asked = []

    def answer(text, temperature):
        asked.append(text)
        return said[text.split("\n")[1]]

    monkeypatch.setattr(judges, "asked", answer)
    texts = ["<answer>cat</answer>", "hm <answer>dog</answer>", "cat", "<answer>cow</answer>"]
    assert judges.meant([""] * 4, texts, ["a", "b", "c", "d"]) == [1.0, 0.0, 0.0, None]
    # The judge is asked concurrently, so the order of its requests is open.
    answers = sorted(text.split("Second text:\n")[1].split("\n")[0] for text in asked)
    assert answers == ["a", "b", "d"]


def test_with_what_follows_a_judge_says_whether_the_text_goes_on_as_the_guess_does(monkeypatch):
    asked = []
    monkeypatch.setattr(judges, "asked", lambda text, temperature: asked.append(text) or "Yes")
    texts = ["<answer>It slept. Nobody came.</answer>", "It slept.", "<answer>It slept.</answer>"]
    columns = {"answer": ["It slept."] * 3, "following": ["Nobody came. It rained.", "", ""]}
    assert judges.meant([""] * 3, texts, **columns) == [1.0, 0.0, 1.0]
    first, second = sorted(asked, key=len, reverse=True)
    assert first.startswith("Prediction:\nIt slept. Nobody came.\n\nReference:\nIt slept. Nobody came. It rained.\n\n")
    assert second.startswith("Prediction:\nIt slept.\n\nReference:\nIt slept.\n\n")
