"""Rewards by a judge. The judge is a script here, behind real sockets."""

import http.server
import json
import re
import threading
import urllib.error

import pytest
from support.refusal import refused

from jaxrl_llm.config import RewardsConfig
from jaxrl_llm.scoring import judges


@pytest.fixture
def judge(monkeypatch):
    """A judge that says "Score: N" for answers "N", and "flawed" for solutions with "guess".

    It returns the received texts.
    """
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body | {"path": self.path, "token": self.headers.get("Authorization")})
            text = body["messages"][0]["content"]
            if "Solution:" in text:
                said = (
                    "It is FLAWED." if "a guess" in text else "no verdict" if "odd\n" in text else "Not flawed: sound."
                )
            else:
                number = re.search(r"Answer:\n(\S+)", text)[1]
                said = f"Score: 0 at first, on reflection\nScore: {number}"
            data = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("JAXRL_JUDGE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        yield bodies
        server.shutdown()


def test_grades_are_tenths_in_the_order_of_the_completions(judge, monkeypatch):
    monkeypatch.setenv("JAXRL_JUDGE_MODEL", "wise")
    monkeypatch.setenv("JAXRL_JUDGE_TOKEN", "secret")
    prompts = ["Why?", [{"role": "user", "content": "How?"}]] * 6
    texts = [str(i) for i in range(12)]
    got = judges.judged(prompts, texts, rubric=["Be kind."] * 12, other=[1] * 12)
    assert got == [pytest.approx(i / 10) for i in range(11)] + [None]
    assert {body["model"] for body in judge} == {"wise"} and {body["token"] for body in judge} == {"Bearer secret"}
    assert {body["path"] for body in judge} == {"/v1/chat/completions"}
    assert all("Be kind." in body["messages"][0]["content"] for body in judge)
    assert any("user: How?" in body["messages"][0]["content"] for body in judge)
    assert judges.judged(["p"], ["**Score:**8"]) == [0.8]
    assert judges.judged(["p"], ["7.5"]) == [0.75] and judges.RUBRIC in judge[-1]["messages"][0]["content"]


def test_a_flawed_way_to_a_right_answer_costs_one_and_wrong_ones_are_not_asked_about(judge):
    """FAPO's eq.

    4 and 8: 1 for a right answer, 1 - 1 if it is flawed, -1 for a wrong one. A reply with neither word ("odd") is no
    flaw.
    """
    texts = ["by steps\n4", "a guess\n4", "a guess\n5", "odd\n4"]
    scores = judges.fapo(["2+2"] * 4, texts, ["4"] * 4)
    assert scores == [1.0, 0.0, -1.0, 1.0]
    assert len(judge) == 3
    assert [score >= RewardsConfig().pass_threshold for score in scores] == [True, False, False, True]


def test_right_answers_whose_judge_is_not_there_have_no_reward(monkeypatch):
    monkeypatch.setenv("JAXRL_JUDGE_URL", "http://127.0.0.1:9/v1")
    assert judges.fapo(["2+2"], ["5"], ["4"]) == [-1.0]
    with pytest.raises(urllib.error.URLError):
        judges.fapo(["2+2"] * 2, ["5", "4"], ["4"] * 2)


def test_votes_are_drawn_and_those_with_a_score_are_averaged(judge, monkeypatch):
    monkeypatch.setenv("JAXRL_JUDGE_VOTES", "3")
    grades = iter([3, 9, 6, 11, 5, 12, 11, 12, 13])
    monkeypatch.setattr(judges, "_grade", lambda said: ((x := next(grades)) <= 10 and x / 10) or None)
    assert judges.judged(["p"] * 3, ["1", "2", "3"]) == [pytest.approx(0.6), pytest.approx(0.5), None]
    assert len(judge) == 9 and {body["temperature"] for body in judge} == {1.0}


def test_steps_count_up_to_the_first_wrong_one_and_only_with_an_answer(monkeypatch):
    said = {
        "a": "Step 1: right\n**Step 2:** right\nStep 3: right",
        "b": "Step 1: right\nstep 2: WRONG",  # of what follows nothing need be said
        "c": "Step 1: wrong\nStep 2: right\nStep 3: right",
        "d": "Step 1: right\nStep 3: right",
    }
    asked = []
    texts = [f"x\n\ny |{name}|\n<answer>4</answer>" for name in said]
    monkeypatch.setattr(judges, "asked", lambda text, temperature: asked.append(text) or said[text.split("|")[1]])
    assert judges.stepwise(["2+2"] * 5, [*texts, "x\ny |a|\n4"]) == [1.0, pytest.approx(1 / 3), 0.0, None, 0.0]
    # The judge is asked concurrently, so the order of its requests is open.
    assert len(asked) == 4
    assert "Step 1: x\nStep 2: y |a|\nStep 3: <answer>4</answer>" in min(asked)


@pytest.mark.parametrize(
    ("text", "truth", "reward"),
    [
        ("The first is vague. Scores: 3, 8.5, 2", [0, 1, 0], 1.0),
        ("Scores: 1, 2\n**Scores:** [9, 2]", [1, 0], 1.0),  # the last ones
        ("Scores: 8, 8", [1, 0], -1.0),  # as high as another
        ("Scores: 3, 8", [0, 1, 0], -1.0),  # not of all
        ("Scores: -1, -2", [0.5, 0.2], 1.0),
        ("8 and 3", [1, 0], -1.0),
        ("Scores: 1", [1], 1.0),
        ("Scores: 0", [1], -1.0),
        ("Scores: \u22121, \u22122", [0.5, 0.2], 1.0),
        ("Scores\uff1a\uff13\uff0c\uff18", [0, 1], 1.0),
        ("Scores: 9, 1e1", [0, 1], 1.0),
        ("Scores: 3/10, 8/10", [0, 1], 1.0),
        ("Scores: 8 and 3", [1, 0], -1.0),
    ],
)
def test_who_judges_is_worth_something_where_the_best_answer_is_found(text, truth, reward):
    assert judges.ranked(["p"], [text], [truth]) == [reward]


def test_a_policy_that_judges_its_own_answer_is_given_both_by_turn():
    assert judges.doubt("2+2", ["4"]) == judges.DOUBT and judges.doubt("2+2", ["4", "yes"]) is None
    turns = [["It is 4", "Yes."], ["5", "yes"], ["5", "Yes? no"], ["4", "no"], ["4", "maybe"], ["5"]]
    messages = [[{"role": "assistant", "content": text} for text in row] for row in turns]
    for row in messages:
        row[1:1] = [{"role": "user", "content": judges.DOUBT}]
    got = judges.own(["2+2"] * 6, [row[-1] for row in turns], messages, ["4"] * 6)
    assert got == [[1, 1], [0, 0], [0, 1], [1, 0], [1, 0], [0]]


def test_a_label_that_is_not_there_is_met_by_nothing():
    """`null` must not be compared as the word "None"."""
    said = [[{"role": "assistant", "content": "None"}]]
    for score in (lambda: judges.fapo(["p"], ["None"], [None]), lambda: judges.own(["p"], ["None"], said, [None])):
        with refused("answer", None, raises=ValueError):
            score()


def test_a_judge_that_is_not_there_is_a_failure(monkeypatch):
    monkeypatch.setenv("JAXRL_JUDGE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(urllib.error.URLError):
        judges.judged(["p"], ["1"])


@pytest.mark.parametrize(
    ("said", "share"),
    [
        *(
            ("Score: 1e1", 1.0),
            ("Score: 8/10", 0.8),
            ("Score: 4/5", 0.8),
            ("**Score:** **8**", 0.8),
            ("Score = 8.", 0.8),
        ),
        *(("score is 8", 0.8), ("Score\uff1a\uff18", 0.8), (r"Score: $\boxed{8}$", 0.8), ("Score: 7,5", 0.75)),
        *(("Score: 3\nScore: 8", 0.8), ("Score: 8 out of 10", 0.8), ("Score: 0", 0.0), ("Score: 10", 1.0)),
        *(("Score: 8-9", None), ("Score: 11", None), ("Score: 1e2", None), ("Score: high", None), ("8", None)),
    ],
)
def test_a_grade_is_a_number_in_any_notation(said, share, monkeypatch):
    monkeypatch.setattr(judges, "asked", lambda text, temperature: said)
    assert judges.judged(["p"], ["x"]) == [None if share is None else pytest.approx(share)]


@pytest.mark.parametrize(
    ("said", "score"),
    [
        *(("It is flawed.", 0.0), ("It is not flawed.", 1.0), ("Not flawed", 1.0), ("unflawed", 1.0), ("sound", 1.0)),
        *(("It is not sound.", 0.0), ("unsound", 0.0), ("It isn\u2019t flawed", 1.0), ("flawed? No: SOUND", 1.0)),
        *(("sound? No: flawed", 0.0), ("no verdict", 1.0)),
    ],
)
def test_a_verdict_that_is_denied_is_the_other_one(said, score, monkeypatch):
    monkeypatch.setattr(judges, "asked", lambda text, temperature: said)
    assert judges.fapo(["p"], ["4"], ["4"]) == [score]


def test_what_a_judge_thinks_is_no_verdict(monkeypatch):
    """A judge that reasons mentions grades before it gives one, and its reasoning may be cut off."""
    replies = [
        "<think>Score: 3</think>Score: 8",
        "Score: 3</think>Score: 8",
        "<think>Score: 3, or",
        "<think>Score: 3</think>",
    ]
    given = iter(replies)
    monkeypatch.setattr(judges, "AT_ONCE", 1)
    monkeypatch.setattr(judges, "asked", lambda text, temperature: next(given))
    assert judges.judged(["p"] * 4, ["x"] * 4) == [0.8, 0.8, None, None]
    assert judges.ranked(
        ["p"] * 2, ["<think>Scores: 9, 1</think>Scores: 1, 9", "<think>Scores: 1, 9"], [[0, 1]] * 2
    ) == [1, -1]
    turns = [{"role": role, "content": text} for role, text in (("assistant", "4"), ("user", "?"))]
    turns.append({"role": "assistant", "content": "yes</think> No."})
    assert judges.own(["p"], [""], [turns], ["4"]) == [[1.0, 0.0]]
