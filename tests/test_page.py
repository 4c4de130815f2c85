"""The page of python -m rate in a browser: what clicks and keys ask of the server, and what is seen. The server is a
mock within the page; a test's steps run in the page's own scope. Without Chromium or Chrome these tests are skipped."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest
from conftest import ROOT

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium")

# The server as the page sees it. A record is a text that the page hands back as it got it.
# A test may put its own answer, an object or a promise, into `server`.
SERVER = """
const ID = "12345678901234567890"; // of 64 bits: a number of JavaScript would be another one
const thumbs = {};
const count = (label) => Object.values(thumbs).filter((x) => x === label).length;
const counts = () => ({ up: count(true), down: count(false), command: "" });
let answers = 0;
const answerOf = (text, more) => {
  const record = `{"completion": ${JSON.stringify(text)}, "id": ${ID}}`;
  return { text, record, cut: false, ...more };
};
const completionOf = (record) => {
  if (!record.endsWith(`, "id": ${ID}}`)) throw new Error(`another record: ${record}`);
  return JSON.parse(record).completion;
};
const server = {
  "/state": () => ({ mode: CARDS.length ? "cards" : "chat", model: "m", chat: true, cards: CARDS, ...counts() }),
  "/answer": () => answerOf(`answer ${++answers}`, { model: "m" }),
  "/rate": ({ record, label }) => { thumbs[completionOf(record)] = label; return counts(); },
};
fetch = async (path, options) => {
  const content = await server[path](options && JSON.parse(options.body));
  return { ok: true, json: async () => JSON.parse(JSON.stringify(content)) };
};
const stored = {}; // of this page alone
const storage = { setItem: (name, x) => { stored[name] = x; }, getItem: (name) => stored[name] ?? null };
Object.defineProperty(window, "sessionStorage", { value: storage });
"""
PERSON = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const press = (key, more) => {
  const event = new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more });
  (document.activeElement || document.body).dispatchEvent(event);
  return event;
};
const click = (words) => [...document.querySelectorAll("button")].findLast((x) => x.textContent === words).click();
const say = async (text) => { $("text").value = text; press("Enter"); await wait(50); };
const shown = () => document.querySelector(".user").textContent;
const found = [];
(async () => {
  await wait(50);
  try { STEPS } catch (e) { found.push(String(e)); }
  parent.postMessage(found, "*");
})();
"""
# One browser shows the pages, one after the other, and collects what they find.
FRAMES = """
<style> body { margin: 0 } iframe { border: 0; width: 800px; height: 900px } </style>
<iframe></iframe>
<output></output>
<script>
const all = [];
const next = () => { document.querySelector("iframe").src = `${all.length}.html`; };
addEventListener("message", ({ data }) => {
  all.push(data);
  document.querySelector("output").textContent = JSON.stringify(all);
  if (all.length < COUNT) next();
});
next();
</script>
"""
TWICE = "click('👎'); await wait(GAP); click('👎'); await wait(1000); found.push(thumbs);"
HOLD = "press(KEY); for (let i = 0; i < 60; i++) { await wait(33); press(KEY, { repeat: true }); }"
THREE = ("one", "two", "three")
# name -> the prompts of the cards, or none for a chat; the steps, in JavaScript; what they push to `found`
CASES = {
    "a selected part of an answer gets a mark in characters as Python counts them": (
        (),
        """
        const asked = [];
        server["/answer"] = () => answerOf("fig 🦊 apple pear", { model: "m" });
        server["/rate"] = ({ label, spans }) => { asked.push([label, spans]); return counts(); };
        const select = (from, to) => {
          const text = document.querySelector(".answer").firstChild;
          getSelection().setBaseAndExtent(text, from, text, to);
        };
        await say("one");
        select(7, 12); click("👎"); await wait(600); // the fox is two units of JavaScript
        found.push(document.querySelector("mark.down").textContent);
        click("👍"); await wait(600);
        found.push(...asked);
        """,
        [
            "apple",
            *([label, [{"start": 6, "end": 11, "label": False}]] for label in (False, True)),
        ],
    ),
    "the second click of a double click neither withdraws a thumb": (
        (),
        f"await say('one'); {TWICE.replace('GAP', '20')}",
        [{"answer 1": False}],
    ),
    "nor rates the next answer": (
        THREE,
        TWICE.replace("GAP", "250") + "found.push(shown());",
        [{"answer 1": False}, "two"],
    ),
    "nor if it is slow": (
        THREE,
        TWICE.replace("GAP", "450") + "found.push(shown());",
        [{"answer 1": False}, "two"],
    ),
    "thumbs are drawn because a system may have no font with these characters": (
        (),
        """
        await say("one");
        for (const node of document.querySelectorAll(".drawn")) {
          const drawing = getComputedStyle(node, "::before");
          found.push([node.textContent, getComputedStyle(node).fontSize, drawing.width, drawing.clipPath.slice(0, 4)]);
        }
        """,
        [[thumb, "0px", "24px", "path"] for thumb in "👍👎👍👎"],
    ),
    "a long answer is scrolled by the arrows and stays where its reader is": (
        ("one", "two"),
        """
        const lines = "a line\\n".repeat(200);
        let later = null;
        server["/answer"] = ({ record }) => {
          const { prompt } = JSON.parse(record);
          const answer = answerOf(prompt + lines);
          return prompt === "one" ? answer : new Promise((done) => { later = () => done(answer); });
        };
        for (const step of steps) step.answers = [];
        await show();
        scrollTo(0, 900);
        const kept = [];
        const look = () => kept.push(Math.round(scrollY));
        press("ArrowDown"); press("ArrowDown"); press("ArrowUp"); press("ArrowDown", { shiftKey: true });
        await wait(1000);
        look();                   // of "one", which has no thumb
        later(); await wait(50);  // "two" comes, while "one" is read
        look();
        found.push(thumbs, shown(), kept);
        click("Another answer"); await wait(50);
        found.push(scrollY > 2000);
        """,
        [{}, "one", [900, 900], True],
    ),
    "an arrow rates if all is in sight": (
        ("one", "two"),
        "press('ArrowDown'); await wait(1000); found.push(thumbs);",
        [{"answer 1": False}],
    ),
    "without keys a card can be gone past and a thumb be changed": (
        THREE,
        """
        click("👍"); await wait(1000);
        click("Back"); click("👎"); await wait(1000);
        found.push(shown(), thumbs);
        server["/answer"] = () => { throw new Error("no answer"); };
        steps[1].answers = [];
        click("Next"); await wait(50);
        found.push(shown(), steps[1].answers.length);
        click("Next");
        found.push(shown());
        """,
        ["one", {"answer 1": False}, "two", 0, "three"],
    ),
    "an enter that confirms a word of an input method sends nothing": (
        (),
        """
        $("text").value = "にほん";
        press("Enter", { isComposing: true }); press("Enter", { keyCode: 229 }); // Safari
        await wait(50);
        found.push(answers, $("text").value);
        """,
        [0, "にほん"],
    ),
    "a message survives a reload that comes before its answer": (
        (),
        """
        await say("one");
        server["/answer"] = () => new Promise(() => {});
        await say("a long message");
        server["/answer"] = () => answerOf("an answer");
        steps = [];
        await begin();
        await wait(50);
        found.push(...steps.map((step) => [step.prompt.at(-1).content, step.answers[0].text]));
        """,
        [["one", "answer 1"], ["a long message", "an answer"]],
    ),
    "of several answers the page shows the one from which the chat went on": (
        (),
        """
        await say("one");
        click("Another answer"); await wait(50);
        await say("two");
        steps[0].answers.forEach((x) => { x.label = null; });
        rate(steps[0], steps[0].answers[0], true); await wait(50);
        found.push([...document.querySelectorAll(".aside")].map((x) => x.textContent), steps[1].prompt[1].content);
        """,
        [["answer 1"], "answer 2"],
    ),
    "enter opens what has the focus and goes to the next card elsewhere": (
        ("one", "two"),
        """
        $("training").hidden = false; document.querySelector("summary").focus();
        found.push(press("Enter").defaultPrevented, shown());
        document.activeElement.blur(); press("Enter"); await wait(50); found.push(shown());
        """,
        [False, "one", "two"],
    ),
    "an answer that is not of the server is said in words": (
        (),
        """
        await say("one");
        const json = async () => { throw new SyntaxError("Unexpected token <"); };
        fetch = async () => ({ ok: false, status: 502, statusText: "Bad Gateway", json });
        click("👍"); await wait(50);
        found.push(document.querySelector("[role=alert]").textContent);
        """,
        [
            "This thumb was not saved: A proxy or another program answered in place of this one: 502 Bad Gateway"
        ],
    ),
    "of several answers the one that a key rates has a frame": (
        ("one",),
        """
        const framed = () => [...document.querySelectorAll(".keyed")].map((x) => x.textContent);
        found.push(framed());
        press("a"); await wait(50);
        found.push(framed());
        press("k"); await wait(50);
        found.push({ ...thumbs }, framed());
        press("j"); await wait(50);
        found.push(thumbs);
        """,
        [
            [],
            ["answer 1"],
            {"answer 1": True},
            ["answer 2"],
            {"answer 1": True, "answer 2": False},
        ],
    ),
    "a paragraph stands in the direction of its own script": (
        (),
        """
        server["/answer"] = () => answerOf("مرحبا\\nhello");
        await say("hello");
        const box = document.querySelector(".answer").getBoundingClientRect();
        const range = document.createRange();
        range.selectNodeContents(document.querySelector(".answer"));
        for (const line of range.getClientRects()) {
          if (line.width > 9) found.push([line.left - box.left < 20, box.right - line.right < 20]);
        }
        """,
        [[False, True], [True, False]],
    ),
    "an answer without a visible character is told from an empty one": (
        (),
        """
        for (const text of ["", " \\n\\u200b", " a\\n"]) {
          server["/answer"] = () => answerOf(text);
          await say("one");
          found.push([...document.querySelectorAll(".answer")].at(-1).textContent);
        }
        """,
        ["(an empty answer)", "(an answer of nothing but blanks)", " a\n"],
    ),
    "the end of the cards speaks of a command where there is one": (
        ("one",),
        """
        press("k"); await wait(1000); found.push(document.querySelector(".empty").textContent);
        state.command = "python kto.py --out_dir o"; render();
        found.push(document.querySelector(".empty").textContent);
        """,
        [
            "All prompts have a thumbThank you.",
            "All prompts have a thumbThank you. The command below trains on them.",
        ],
    ),
    "a screen reader hears an answer once and not the whole chat at each thumb": (
        (),
        """
        const said = [];
        const changes = (list) => list.forEach((x) => x.addedNodes.forEach((node) => said.push(node.textContent)));
        const observer = new MutationObserver(changes);
        const all = { childList: true, subtree: true };
        document.querySelectorAll("[aria-live]").forEach((node) => observer.observe(node, all));
        await say("one");
        await say("two");
        click("👍"); await wait(50);
        found.push(said.filter((text) => text.includes("answer")), said.some((text) => text.includes("👍 1")));
        """,
        [["answer 1", "answer 2"], True],
    ),
    "an open page names the model that answers when the program was started with another": (
        (),
        """
        await say("one");
        found.push($("model").textContent);
        server["/answer"] = () => answerOf("a", { model: "out/thumbs-1" });
        await say("two");
        found.push($("model").textContent);
        """,
        ["m", "thumbs-1"],
    ),
    "a held key counts once": (
        THREE,
        HOLD.replace("KEY", "'k'") + "found.push(thumbs, shown());",
        [{"answer 1": True}, "two"],
    ),
    # there the browser itself repeats the click, unless the page keeps it from doing so
    "also on a button": (
        (),
        """
        await say("one"); document.querySelector(".thumb").focus();
        found.push(press("Enter").defaultPrevented, press("Enter", { repeat: true }).defaultPrevented);
        """,
        [False, True],
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What the steps of each case found."""
    folder = tmp_path_factory.mktemp("pages")
    for i, (prompts, steps, _) in enumerate(CASES.values()):
        cards = []
        for n, prompt in enumerate(prompts):
            cards.append({"id": n, "prompt": prompt, "record": json.dumps({"prompt": prompt})})
        text = (ROOT / "rate" / "page.html").read_text()
        begin = SERVER.replace("CARDS", json.dumps(cards))
        text = text.replace("<script>", f"<script>{begin}</script>\n<script>")
        text = text.replace("\nbegin();\n", f"\nbegin();\n{PERSON.replace('STEPS', steps)}")
        (folder / f"{i}.html").write_text(text)
    (folder / "all.html").write_text(FRAMES.replace("COUNT", str(len(CASES))))
    argv = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000"]
    argv += [
        "--window-size=800,900",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        (folder / "all.html").as_uri(),
    ]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    output = re.search("<output>(.*)</output>", said.stdout, re.DOTALL)
    assert output, said.stderr
    return dict(zip(CASES, json.loads(unescape(output[1]))))


@pytest.mark.parametrize("name", CASES)
def test_the_page(name, found):
    assert found[name] == CASES[name][2]
