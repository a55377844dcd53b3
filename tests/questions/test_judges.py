"""Rewards by a judge: a server that is a script here, with real sockets."""

import http.server
import json
import re
import threading
import urllib.error

import pytest

from jaxrl_llm.questions.tasks import judges


@pytest.fixture
def judge(monkeypatch):
    """Says "Score: N" for answers "N", and "flawed" of solutions with "guess"; gives what it was asked."""
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
        threading.Thread(target=server.serve_forever, daemon=True).start()
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


def test_a_flawed_way_to_a_right_answer_is_worth_nothing_and_wrong_ones_are_not_asked_about(judge):
    texts = ["by steps\n4", "a guess\n4", "a guess\n5", "odd\n4"]
    assert judges.fapo(["2+2"] * 4, texts, ["4"] * 4) == [1.0, 0.0, 0.0, None]
    assert len(judge) == 3


def test_a_judge_that_is_not_there_is_a_failure(monkeypatch):
    monkeypatch.setenv("JAXRL_JUDGE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(urllib.error.URLError):
        judges.judged(["p"], ["1"])
