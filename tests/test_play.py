"""The playground admits expressions of x and y only, answers the loopback only, and tells what really runs."""
from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from urllib.parse import urlencode

import pytest
import torch
from browser import MISSING, chromium, no_complaints
from harness import PYTHON, environment

import globaltensor as gt
from globaltensor.playground.expression import ExpressionError, compute, parse_expression
from globaltensor.playground.server import answer_to, export_examples, make_server
from globaltensor.playground.tryout import EXAMPLES, read_tryout, show_tryout
from globaltensor_command import main

X, Y = torch.rand(6, 4), torch.rand(4, 6)
GOOD = {
    "x @ y": lambda x, y: x @ y, "-x + 2 * x": lambda x, y: -x + 2 * x,
    "torch.relu(x - 0.5)": lambda x, y: torch.relu(x - .5),
    "F.gelu(x)": lambda x, y: torch.nn.functional.gelu(x), "x.T + y": lambda x, y: x.T + y,
    "x > 0.5": lambda x, y: x > .5,
    "torch.softmax(x @ y, dim=-1)": lambda x, y: torch.softmax(x @ y, -1), "x[1:3, 0]": lambda x, y: x[1:3, 0],
    "torch.cat([x, y.T], 0)": lambda x, y: torch.cat([x, y.T], 0), "x.sum(0).max()": lambda x, y: x.sum(0).max(),
    "x ** 2": lambda x, y: x ** 2, "torch.nn.functional.mse_loss(x, y.T, reduction='sum')":
        lambda x, y: ((x - y.T) ** 2).sum(), "x[None, :, 2]": lambda x, y: x[None, :, 2],
    "x.view(-1, 2)": lambda x, y: x.view(-1, 2)}


@pytest.mark.parametrize("text", GOOD)
def test_an_expression_gives_what_python_gives(text):
    assert torch.equal(compute(parse_expression(text), {"x": X, "y": Y}), GOOD[text](X, Y)) or torch.allclose(
        compute(parse_expression(text), {"x": X, "y": Y}), GOOD[text](X, Y))


BAD = ["", "x @", "z", "import os", "__import__('os').system('true')", "x.__class__", "x.__class__.__mro__",
       "torch.load('f')", "torch.save(x, 'f')", "torch.os", "x.data", "x.numpy()", "x.tolist()", "(lambda: x)()",
       "[a for a in x]", "x if x else y", "f'{x}'", "'text'", "x.apply_(1)", "torch.nn.functional",
       "torch.nn.Module()", "x.backward()", "torch.ops.aten.mm(x, y)", "x := y", "x and y", "{1: 2}", "x.sum(**y)",
       "torch.sum(*x)", "torch", "F", "F.os", "10 ** 10 ** 10", "x ** y", "1e9", "x.view.__self__",
       "torch.einsum('a,b,c->abc', x, x, x)", "open('f')", "exec('1')", "x" + ".T" * 50, "x +" * 200 + "x",
       "getattr(x, 'T')", "x[lambda: 0]", "x.sum.__globals__", "await x", "x.share_memory_()", "torch.ones(9999999)"]


@pytest.mark.parametrize("text", BAD)
def test_anything_else_is_refused(text):
    with pytest.raises(ExpressionError):
        compute(parse_expression(text), {"x": X, "y": Y})


@pytest.mark.parametrize("text", ["[x] * 1000000", "torch.split(x, 1) * 1000000", "(((9 ** 4) ** 4) ** 4) ** 4",
                                  "x[:, None, None, :] * torch.outer(x.flatten(), y.flatten()).flatten()[:, None]",
                                  "torch.where(x.flatten()[:, None, None, None] > 0, y.flatten()[:, None, None], "
                                  "torch.outer(x[0], x[:, 0]).flatten()) * torch.outer(x.flatten(), x.flatten())"])
def test_what_would_fill_the_memory_is_refused(text):
    began = time.perf_counter()
    big = torch.rand(32, 64)
    with pytest.raises((ExpressionError, RuntimeError)):
        compute(parse_expression(text), {"x": big, "y": big})
    assert time.perf_counter() - began < 5


# ----------------------------------------------------------------------------------------------------------- tryouts


@pytest.fixture(scope="module", autouse=True)
def sixteen_ranks():
    if gt.world_size() < 4:
        gt.init(ranks=16)


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_told_as_it_runs(title):
    of = EXAMPLES[title]
    html = show_tryout(of)
    names: dict = {"gt": gt, "torch": torch}
    lines = of.program.splitlines()
    exec("\n".join(lines[:-1]), names)               # the program on the page
    found = eval(re.fullmatch(r"print\((.*)\)", lines[-1])[1], names)
    for row in found.rows:
        assert row.op in html
    moved = [move for row in found.rows for move in row.moves if move.bytes]
    assert html.count("bytes between ranks") == len(moved[:8])
    assert ("Nothing has to move" in html) == (not moved) and f"{found.bytes:,} bytes come" in html or not moved
    assert "<script" not in html


def test_the_rule_is_the_one_that_is_written():
    row, = gt.explain(lambda: gt.ones(4, 4, placement=gt.placement("cpu", [0, 1]), sbp="B") @ gt.ones(
        4, 4, placement=gt.placement("cpu", [0, 1]), sbp="B")).rows[-1:]
    assert row.rule == "m k, k n -> m n    a*b"


def test_a_lone_axis_has_the_name_that_a_placement_gives_it():
    own, = gt.placement("cpu", [0, 1]).names
    html = answer_to({"axes": "2", "expression": "x + 1", "x_shape": "4", "x_sbp": "B", "y_sbp": "B"})
    assert own in html and f"axis_names=('{own}',)" in unescape(html)


def test_every_sbp_of_a_grid_is_shown():
    for x_sbp, y_sbp in product(("B B", "S(0) P", "S(1) S(0)"), ("B S(0)", "P B")):
        html = answer_to({"axes": "2,2", "expression": "x @ y", "x_shape": "5, 4", "y_shape": "4, 3", "x_sbp": x_sbp,
                      "y_sbp": y_sbp})
        assert "class='error'" not in html and html.count("what each rank holds") == 3


WRONG = [({"axes": "17"}, "17 ranks"), ({"axes": "2,2,2"}, "2 x 2 x 2 ranks"), ({"axes": "0"}, "0 ranks"),
         ({"axes": "<b>"}, "numbers with commas"), ({"x_shape": "2, 2, 2, 2"}, "3 dims"),
         ({"x_shape": "64, 64"}, "elements"),
         ({"x_sbp": "Q"}, "not an sbp"), ({"x_sbp": "B B"}, "2 sbps"), ({"x_sbp": "S(5)"}, "its dims are"),
         ({"expression": "x @ <b>"}, "&lt;b&gt;"), ({"expression": "x.os"}, "not admitted"),
         ({"expression": "x @ y", "x_shape": "3, 3", "y_shape": "4, 4"}, "error"), ({"expression": "x[9]"}, "error"),
         ({"expression": "1 / 0"}, "division"), ({"expression": "torch.sum(x, 7)"}, "error")]


@pytest.mark.parametrize("query, why", WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_is_an_answer(query, why):
    html = answer_to(query)
    assert why in html and "class='error'" in html and "<b>" not in html and "Traceback" not in html


def test_examples_are_exported_as_pages(tmp_path):
    written = export_examples(tmp_path / "pages")
    assert len(written) == len(EXAMPLES) + 1
    for path in written:
        html = path.read_text()
        assert "<script" not in html and not re.search(r"(?:src|href)=\"(?:https?:|/)", html)
    assert all(f'href="{path.name}"' in written[-1].read_text() for path in written[:-1])
    (tmp_path / "file").write_text("")
    assert main(["play", "--export", str(tmp_path / "file" / "x")]) == 1


# ------------------------------------------------------------------------------------------------------------ server


@pytest.fixture
def address():
    server = make_server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def get(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
            return reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_it_answers_the_loopback_only(address):
    port = address.rpartition(":")[2]
    status, page, headers = get(address + "/")
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert json.loads(re.search(r'id="setting">(.*?)</script>', page)[1])["most"] == 16
    assert get(address + "/", Host=f"localhost:{port}")[0] == 200
    for host in ("example.org", f"example.org:{port}", "127.0.0.1:1", f"127.0.0.1.example.org:{port}", "",
                 f"127.0.0.1@{port}"):
        assert get(address + "/show?axes=2", Host=host)[0] == 403, host
    assert get(address + "/../../etc/passwd")[0] == get(address + "/x")[0] == 404
    query = urlencode({"axes": "2,2", "expression": "x @ y", "x_sbp": "S(0) B", "y_sbp": "B S(1)"})
    status, html, _ = get(f"{address}/show?{query}")
    assert status == 200 and "what each rank holds" in html
    assert get(address + "/examples")[1].count("<h1>") == len(EXAMPLES)
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(address + "/show", data=b"x", method=method)
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=60)


# what browsers say of a request, and whether it is answered; the port is this server's
ORIGINS = [({}, "/show", True), ({"Sec-Fetch-Site": "same-origin"}, "/show", True),
           ({"Sec-Fetch-Site": "none"}, "/show", True), ({"Origin": "http://127.0.0.1:PORT"}, "/show", True),
           ({"Origin": "http://localhost:PORT"}, "/show", True),
           ({"Sec-Fetch-Site": "cross-site"}, "/show", False), ({"Sec-Fetch-Site": "same-site"}, "/show", False),
           ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, "/", True),     # a link
           ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, "/examples", True),
           ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, "/show", False),
           ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "iframe"}, "/", False),
           ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "script"}, "/play.js", False),
           ({"Origin": "null"}, "/show", False), ({"Origin": "https://127.0.0.1:PORT"}, "/show", False),
           ({"Origin": "http://127.0.0.1:1"}, "/show", False), ({"Origin": "http://example.org"}, "/", False)]


@pytest.mark.parametrize("headers, path, answered", ORIGINS, ids=str)
def test_pages_of_other_origins_are_refused(headers, path, answered, address):
    port = address.rpartition(":")[2]
    status, _, reply = get(address + path, **{key: value.replace("PORT", port) for key, value in headers.items()})
    assert status == (200 if answered else 403)
    assert "Access-Control-Allow-Origin" not in reply and reply["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.processes
def test_a_page_of_another_origin_reaches_nothing(address, monkeypatch):
    """Another port of the loopback is another origin: its page tries a fetch, a blind one and a script."""
    from globaltensor.playground import server
    tries = f"""const at = "{address}", told = {{}};
        const say = (name, text) => () => told[name] = text;
        const tell = (name, promise) => promise.then(say(name, "reached"), say(name, "refused"));
        Promise.allSettled([
          tell("fetch", fetch(at + "/show?axes=2").then(reply => reply.text())),
          tell("blind", fetch(at + "/show?axes=2", {{mode: "no-cors"}})),
          tell("script", new Promise((done, failed) => {{
            const script = document.createElement("script");
            Object.assign(script, {{src: at + "/play.js", onload: done, onerror: failed}});
            document.head.append(script);
          }})),
        ]).then(() => {{ window.told = told; }});"""
    asked = []
    monkeypatch.setattr(server, "answer_to", lambda query: asked.append(query) or "an answer")

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(f"<body><script>{tries}</script></body>".encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other, chromium() as browser:
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.02}).start()
        try:
            browser.get(f"http://127.0.0.1:{other.server_port}/")
            until = time.monotonic() + 30
            while (told := browser.execute_script("return window.told")) is None:
                assert time.monotonic() < until
                time.sleep(0.02)
        finally:
            other.shutdown()
    assert told == {"fetch": "refused", "blind": "refused", "script": "refused"} and not asked


@pytest.mark.processes
def test_the_command_serves_until_it_is_interrupted():
    process = subprocess.Popen([PYTHON, "-m", "globaltensor.cli", "play"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment())
    try:
        address = process.stdout.readline().split()[0]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address) and get(address)[0] == 200
        port = address.rstrip("/").rpartition(":")[2]
        assert main(["play", "--port", port]) == 1   # it is taken
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and err == "" and out.strip() == ""


@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: apt-get install chromium chromium-driver, and "
                    "pip install 'globaltensor[browser]'")
@pytest.mark.processes
def test_layouts_are_set_by_mouse(address):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    def shows(browser, number):
        end = time.monotonic() + 60
        while browser.execute_script("return window.play && play.shown") < number:
            assert time.monotonic() < end
            time.sleep(0.02)
        return browser.find_element(By.ID, "result").text

    def press(browser, where, text, nth=0):
        browser.find_elements(By.XPATH, f"//*[@id='{where}']//button[text()='{text}']")[nth].click()

    with chromium() as browser:
        browser.get(address + "/")
        assert "[8, 6] float32, S(0)" in shows(browser, 1)
        press(browser, "x", "S(1)")
        assert "[8, 6] float32, S(1)" in shows(browser, 2)
        press(browser, "axes", "2")
        assert "rank 3 (1,1)" in shows(browser, 3)
        press(browser, "y", "S(1)", 1)
        text = shows(browser, 4)
        assert "[6, 4] float32, (B, S(1))" in text and "a*b" in text
        field = browser.find_element(By.ID, "expression")
        field.clear()
        field.send_keys("x.__class__")
        time.sleep(1)
        assert "not admitted" in browser.find_element(By.ID, "result").text
        Select(browser.find_element(By.ID, "examples")).select_by_index(4)
        time.sleep(1.5)
        assert "_softmax" in browser.find_element(By.ID, "result").text
        no_complaints(browser)


def test_a_setting_is_read():
    of = read_tryout({"axes": "2,2", "x_shape": "6,8", "x_sbp": "S(0) B", "y_sbp": "B P", "expression": "x"})
    assert of.axes == (2, 2) and of.x_shape == (6, 8) and of.program.splitlines()[:2] == [
        "P = gt.placement(\"cpu\", [[0, 1], [2, 3]], axis_names=('dp', 'tp'))",
        "x = gt.rand(6, 8, placement=P, sbp=(gt.sbp.split(0), gt.sbp.broadcast))"]
