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
  "/state": () => ({ mode: MODE, model: "m", chat: true, cards: CARDS, ...counts() }),
  "/answer": () => answerOf(`answer ${++answers}`, { model: "m" }),
  "/rate": ({ record, label }) => { thumbs[completionOf(record)] = label; return counts(); },
};
fetch = async (path, options) => {
  const content = await server[path](options && JSON.parse(options.body));
  return { ok: true, json: async () => JSON.parse(JSON.stringify(content)) };
};
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
  try { %s } catch (e) { found.push(String(e)); }
  const node = document.createElement("output");
  node.textContent = JSON.stringify(found);
  document.body.replaceChildren(node);
})();
"""


@pytest.fixture
def play(tmp_path):
    """play(steps, cards) -> what the steps, in JavaScript, push to `found`. cards: prompts; without: a chat."""

    def play(steps: str, cards: tuple[str, ...] = (), size: str = "800,900") -> list:
        prompts = []
        for i, prompt in enumerate(cards):
            prompts.append({"id": i, "prompt": prompt, "record": json.dumps({"prompt": prompt})})
        mode = json.dumps("cards" if cards else "chat")
        begin = SERVER.replace("MODE", mode).replace("CARDS", json.dumps(prompts))
        text = (ROOT / "rate" / "page.html").read_text()
        text = text.replace("<script>", f"<script>{begin}</script>\n<script>")
        text = text.replace("\nbegin();\n", f"\nbegin();\n{PERSON % steps}")
        page = tmp_path / "page.html"
        page.write_text(text)
        argv = [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        argv += [
            f"--window-size={size}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            page.as_uri(),
        ]
        said = subprocess.run(argv, capture_output=True, text=True, timeout=100)
        output = re.search("<output>(.*)</output>", said.stdout)
        assert output, said.stderr
        return json.loads(unescape(output[1]))

    return play


def test_a_selected_part_of_an_answer_gets_a_mark_in_characters_as_python_counts_them(play):
    steps = """
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
    """
    apple = [{"start": 6, "end": 11, "label": False}]
    assert play(steps) == ["apple", [False, apple], [True, apple]]


@pytest.mark.parametrize("gap", [20, 250, 450])
def test_the_second_click_of_a_double_click_neither_withdraws_a_thumb_nor_rates_the_next_answer(
    gap, play
):
    steps = f"click('👎'); await wait({gap}); click('👎'); await wait(1000); found.push(thumbs, shown());"
    assert play(steps, ("one", "two", "three")) == [{"answer 1": False}, "two"]
    steps = f"await say('one'); click('👎'); await wait({gap}); click('👎'); await wait(1000); found.push(thumbs);"
    assert play(steps) == [{"answer 1": False}]


def test_thumbs_are_drawn_because_a_system_may_have_no_font_with_these_characters(play):
    steps = """
    await say("one");
    for (const node of document.querySelectorAll(".drawn")) {
      const drawing = getComputedStyle(node, "::before");
      found.push([node.textContent, getComputedStyle(node).fontSize, drawing.width, drawing.clipPath.slice(0, 4)]);
    }
    """
    assert play(steps) == [[thumb, "0px", "24px", "path"] for thumb in "👍👎👍👎"]


def test_a_long_answer_is_scrolled_by_the_arrows_and_stays_where_its_reader_is(play):
    steps = """
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
    """
    steps += "found.push(scrollY > 2000);"
    assert play(steps, ("one", "two")) == [{}, "one", [900, 900], True]
    # where all is in sight, they rate
    assert play("press('ArrowDown'); await wait(1000); found.push(thumbs);", ("one", "two")) == [
        {"answer 1": False}
    ]


def test_without_keys_a_card_can_be_gone_past_and_a_thumb_be_changed(play):
    steps = """
    click("👍"); await wait(1000);
    click("Back"); click("👎"); await wait(1000);
    found.push(shown(), thumbs);
    server["/answer"] = () => { throw new Error("no answer"); };
    steps[1].answers = [];
    click("Next"); await wait(50);
    found.push(shown(), steps[1].answers.length);
    click("Next");
    found.push(shown());
    """
    expected = ["one", {"answer 1": False}, "two", 0, "three"]
    assert play(steps, ("one", "two", "three")) == expected


@pytest.mark.parametrize("how", ["isComposing: true", "keyCode: 229"])  # 229: Safari
def test_an_enter_that_confirms_a_word_of_an_input_method_sends_nothing(how, play):
    steps = f"$('text').value = 'にほん'; press('Enter', {{ {how} }}); await wait(50);"
    steps += "found.push(answers, $('text').value);"
    assert play(steps) == [0, "にほん"]


def test_a_message_survives_a_reload_that_comes_before_its_answer(play):
    steps = """
    await say("one");
    server["/answer"] = () => new Promise(() => {});
    await say("a long message");
    server["/answer"] = () => answerOf("an answer");
    steps = [];
    await begin();
    await wait(50);
    found.push(steps.map((step) => [step.prompt.at(-1).content, step.answers[0].text]));
    """
    assert play(steps) == [[["one", "answer 1"], ["a long message", "an answer"]]]


def test_of_several_answers_the_page_shows_the_one_from_which_the_chat_went_on(play):
    steps = """
    await say("one");
    click("Another answer"); await wait(50);
    await say("two");
    steps[0].answers.forEach((x) => { x.label = null; });
    rate(steps[0], steps[0].answers[0], true); await wait(50);
    found.push([...document.querySelectorAll(".aside")].map((x) => x.textContent), steps[1].prompt[1].content);
    """
    assert play(steps) == [["answer 1"], "answer 2"]


def test_enter_opens_what_has_the_focus_and_goes_to_the_next_card_elsewhere(play):
    steps = "$('training').hidden = false; document.querySelector('summary').focus();"
    steps += "found.push(press('Enter').defaultPrevented, shown());"
    steps += "document.activeElement.blur(); press('Enter'); await wait(50); found.push(shown());"
    assert play(steps, ("one", "two")) == [False, "one", "two"]


def test_an_answer_that_is_not_of_the_server_is_said_in_words(play):
    steps = """
    await say("one");
    const json = async () => { throw new SyntaxError("Unexpected token <"); };
    fetch = async () => ({ ok: false, status: 502, statusText: "Bad Gateway", json });
    click("👍"); await wait(50);
    found.push(document.querySelector("[role=alert]").textContent);
    """
    said = "Not this program but something before it answered, perhaps a proxy: 502 Bad Gateway"
    assert play(steps) == ["This thumb was not saved: " + said]


def test_of_several_answers_the_one_that_a_key_rates_has_a_frame(play):
    steps = """
    const framed = () => [...document.querySelectorAll(".keyed")].map((x) => x.textContent);
    found.push(framed());
    press("a"); await wait(50);
    found.push(framed());
    press("k"); await wait(50);
    found.push({ ...thumbs }, framed());
    press("j"); await wait(50);
    found.push(thumbs);
    """
    both = {"answer 1": True, "answer 2": False}
    assert play(steps, ("one",)) == [[], ["answer 1"], {"answer 1": True}, ["answer 2"], both]


def test_a_paragraph_stands_in_the_direction_of_its_own_script(play):
    steps = """
    server["/answer"] = () => answerOf("مرحبا\\nhello");
    await say("hello");
    const box = document.querySelector(".answer").getBoundingClientRect();
    const range = document.createRange();
    range.selectNodeContents(document.querySelector(".answer"));
    for (const line of range.getClientRects()) {
      if (line.width > 9) found.push([line.left - box.left < 20, box.right - line.right < 20]);  // else the line's end
    }
    """
    assert play(steps) == [[False, True], [True, False]]


def test_an_answer_without_a_visible_character_is_told_from_an_empty_one(play):
    steps = """
    for (const text of ["", " \\n\\u200b", " a\\n"]) {
      server["/answer"] = () => answerOf(text);
      await say("one");
      found.push([...document.querySelectorAll(".answer")].at(-1).textContent);
    }
    """
    assert play(steps) == ["(an empty answer)", "(an answer of nothing but blanks)", " a\n"]


def test_the_end_of_the_cards_speaks_of_a_command_where_there_is_one(play):
    steps = (
        "press('k'); await wait(1000); found.push(document.querySelector('.empty').textContent);"
    )
    steps += "state.command = 'python kto.py --out_dir o'; render();"
    steps += "found.push(document.querySelector('.empty').textContent);"
    end = "All prompts have a thumbThank you."
    assert play(steps, ("one",)) == [end, end + " The command below trains on them."]


def test_a_screen_reader_hears_an_answer_once_and_not_the_whole_chat_at_each_thumb(play):
    steps = """
    const changes = (list) => list.forEach((x) => x.addedNodes.forEach((node) => found.push(node.textContent)));
    const observer = new MutationObserver(changes);
    const all = { childList: true, subtree: true };
    document.querySelectorAll("[aria-live]").forEach((node) => observer.observe(node, all));
    await say("one");
    await say("two");
    click("👍"); await wait(50);
    """
    said = play(steps)
    assert [text for text in said if "answer" in text] == ["answer 1", "answer 2"]
    assert [text for text in said if "👍 1" in text]


def test_an_open_page_names_the_model_that_answers_when_the_program_was_started_with_another(play):
    steps = """
    await say("one");
    found.push($("model").textContent);
    server["/answer"] = () => answerOf("a", { model: "out/thumbs-1" });
    await say("two");
    found.push($("model").textContent);
    """
    assert play(steps) == ["m", "thumbs-1"]


def test_a_held_key_counts_once(play):
    hold = (
        "press(KEY); for (let i = 0; i < 60; i++) { await wait(33); press(KEY, { repeat: true }); }"
    )
    steps = hold.replace("KEY", "'k'") + "found.push(thumbs, shown());"
    assert play(steps, ("one", "two", "three")) == [{"answer 1": True}, "two"]
    # on a button the browser itself repeats the click, unless the page keeps it from doing so
    steps = "await say('one'); document.querySelector('.thumb').focus();"
    steps += "found.push(press('Enter').defaultPrevented, press('Enter', { repeat: true }).defaultPrevented);"
    assert play(steps) == [False, True]
