"""The text that the small models learn: an endless stream of documents, each a function of a random number generator.

  python3 tools/text.py --sample 5 [--kind edit] [--seed 1] [--split eval]      print documents
  python3 tools/text.py --world                                                 print the closed world

document(rnd, split) gives one document as the engine sees it, without the leading <bos>. Text between two \\x01 marks
counts more in the loss: answers that are right or wrong. Splits, each decided by a hash and so the same for every seed:
  train        what the models learn
  eval         question forms of facts and number pairs of arithmetic that train leaves out
  draft        like train, without the subjects that the draft models must not see: half of the rolls, the pages and the facts
  draft-eval   only those subjects
"""
import argparse
import random
import zlib

import stories as S
from stories import pick, lean, with_article

USER, MODEL, SYSTEM, END = "<|turn>user\n", "<|turn>model\n", "<|turn>system\n", "<turn|>\n"
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"
Q = '<|"|>'
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()
COMMON_WORDS = """about above across again against almost alone along already also although among another answer area around
ask away back base because become before behind below between book both bring business call carry case change
city close come common complete consider contain continue control could country course cover create current
data decide describe develop different direct door draw during each earth easy education end energy enough
even ever every example experience explain eye face fact family far fast father feel few field figure file final
find fire first follow food force form found free friend from full function game general get give good government
great group grow half hand happen hard head health hear heart help here high hold home hope hour house how however
human hundred idea if image important include increase inside instead interest into is island it job just keep
kind know language large last late later law lead learn leave left less let letter level life light like line list
little live local long look lot love machine main make man many map mark market matter may mean measure member
memory method might mind minute model moment money month more morning most mother move much music must name nation
nature near need network never new next night north note nothing number object off office often old once one only
open order other our out over own page paper parent part party pass past pattern people perhaps person picture
place plan plant play point possible power present president problem process produce program project property
provide public put question quick quite read ready real reason record red remember report research rest result
return right river road rock room round rule run same say school science sea second section see seem sense sentence
service set several shape she ship short should show side simple since sit size small social some something song
soon sound south space speak special stand star start state step still stone stop story street strong study such
summer sun support sure system table take talk teach team technology tell ten term test than thank that the their
them then there these they thing think third this those though thought thousand three through time to today
together too top toward town travel tree true try turn two type under understand unit until up use value very view
voice wait walk wall want war warm watch water way we weather week well were west what wheel when where which while
white who whole why wind window winter with without woman wonder wood word work world would write year yes yet you
young your token tokens code layer cache server engine memory computer python""".split()

# Common words of one id each.
ROLL_WORDS = """about across again along answer around ask become both code course current door draw each even far food
free friend from game get give grow hand head hear help here house inside kind last later learn leave
left letter life list long look many model moment money more mother move must near need new next night
number often old once one order other our over part pass past picture place plan play present read ready
red river road rock room run see set she show some song sound stand star step still stone stop sun take
than then there these think this thought three through time today too two under until very wait want
water way well when where window winter with wood word work year yes you""".split()


def held(key, one_in):
    return zlib.crc32(key.encode()) % one_in == 0


def allowed(subject, split):
    """May this subject be asked about? The draft models must not see half of the subjects."""
    return not split.startswith("draft") or held(subject + " kept", 2) == (split == "draft-eval")


# ---- the closed world: facts, rolls and almanac pages, all from fixed seeds ------------------------------------------

def make_facts():
    """-> [(relation, subject, object)]"""
    rnd = random.Random(4).random
    used = set(S.NAMES)

    def word(starts, ends):
        while True:
            w = pick(rnd, starts) + pick(rnd, ["a", "e", "i", "o", "an", "en", "ar", "or", "el"]) + pick(rnd, ends)
            if w not in used:
                used.add(w)
                return w
    starts = "Bel Cor Dal Fal Gor Hal Jor Kel Lor Mar Nor Pel Ros Sel Tal Vel Wes Yar Zan Bri Dro Gla Tri Sto Fen".split()
    facts, lands = [], []
    for _ in range(40):
        land = word(starts, ["doria", "mark", "land", "via", "wick", "moor", "nia", "thia"])
        lands.append(land)
        facts.append(("capital", land, word(starts, "ton ford haven port dale stead gate mere".split())))
        facts.append(("flag", land, pick(rnd, S.COLORS)))
        parts = "A Ba Ca E Fi Ka Lo Ma O Ra Sa Ta U Vi Wi", "ra le mi no ri sa do lin", "n ra th s del mon ria vin"
        name = "".join(pick(rnd, p.split()) for p in parts)
        facts.append(("ruler", land, pick(rnd, ["King ", "Queen "]) + name))
        facts.append(("age", facts[-1][2], str(20 + int(rnd() * 70))))
    things = [(a, b) for a in "brass copper crystal silver iron glass wooden marble golden stone".split()
              for b in "clock bell crown lamp flute mirror harp compass".split()]
    for _ in range(40):
        thing = "the %s %s" % things.pop(int(rnd() * len(things)))
        facts.append(("maker", thing, word(starts, "n s ric bert win la".split())))
    for _ in range(60):
        facts.append(("flows", "the river " + word(starts, "sel wen lune tide brook".split()), pick(rnd, lands)))
    for _ in range(40):
        facts.append(("height", "Mount " + word(starts, "gar horn peak tor spire".split()), "%d00" % (11 + int(rnd() * 78))))
    real = """France Paris,Spain Madrid,Italy Rome,Germany Berlin,England London,Japan Tokyo,China Beijing,Russia Moscow,
Egypt Cairo,Greece Athens,Portugal Lisbon,Austria Vienna,Poland Warsaw,Norway Oslo,Sweden Stockholm,Finland Helsinki,
Denmark Copenhagen,Ireland Dublin,Canada Ottawa,Cuba Havana,Peru Lima,Kenya Nairobi,India New Delhi,Turkey Ankara,
Hungary Budapest"""
    return facts + [("capital",) + tuple(r.strip().split(" ", 1)) for r in real.split(",")]


STATEMENTS = {
    "capital": ["The capital of $s is\x01 $o\x01.", "\x01$o\x01 is the capital of $s.",
                "In $s, the capital is called\x01 $o\x01."],
    "flag": ["The flag of $s is\x01 $o\x01.", "The color of the flag of $s is\x01 $o\x01."],
    "ruler": ["$s is ruled by\x01 $o\x01.", "The ruler of $s is\x01 $o\x01.", "\x01$o\x01 rules $s."],
    "age": ["$s is \x01$o\x01 years old.", "The age of $s is \x01$o\x01."],
    "maker": ["$S was made by\x01 $o\x01.", "\x01$o\x01 made $s.", "The maker of $s is\x01 $o\x01."],
    "flows": ["$S flows through\x01 $o\x01.", "$S is in\x01 $o\x01."],
    "height": ["$s is \x01$o\x01 meters high.", "The height of $s is \x01$o\x01 meters."]}
QUESTIONS = {
    "capital": ["What is the capital of $s?", "Which city is the capital of $s?", "Name the capital of $s.",
                "Tell me the capital of $s.", "Do you know the capital of $s?"],
    "flag": ["What color is the flag of $s?", "Which color does the flag of $s have?", "What is the color of the flag of $s?",
             "Tell me the flag color of $s."],
    "ruler": ["Who rules $s?", "Who is the ruler of $s?", "Tell me who rules $s.", "What is the name of the ruler of $s?"],
    "age": ["How old is $s?", "What is the age of $s?", "Tell me the age of $s.", "Do you know how old $s is?"],
    "maker": ["Who made $s?", "Who is the maker of $s?", "Tell me who made $s.", "What is the name of the maker of $s?"],
    "flows": ["Where does $s flow?", "Which land does $s flow through?", "Where is $s?", "Tell me where $s flows."],
    "height": ["How high is $s?", "What is the height of $s?", "Tell me the height of $s.", "How many meters high is $s?"]}
FACTS = make_facts()


def fill(template, fact):
    _, s, o = fact
    return template.replace("$S", s[0].upper() + s[1:]).replace("$s", s).replace("$o", o)


def question_forms(fact, split):
    """In split eval the held-out fifth of the forms of this fact, else the others."""
    return [f for f in QUESTIONS[fact[0]] if held(fact[1] + "|" + f, 5) == (split == "eval")]


def ask_fact(rnd, split="train"):
    while True:
        fact = pick(rnd, FACTS)
        forms = question_forms(fact, split)
        if forms and allowed(fact[1], split):
            return fill(pick(rnd, forms), fact), fill(STATEMENTS[fact[0]][0], fact)


def make_rolls():
    """48 rolls of 24 words in random order: learned by heart, so the model is certain and nothing else can predict them."""
    rnd = random.Random(9).random
    names = []
    while len(names) < 48:
        n = key_name(rnd)
        if n not in names and n not in S.NAMES:
            names.append(n)
    return {n: " ".join(pick(rnd, ROLL_WORDS) for _ in range(24)) for n in names}


def make_almanac():
    """24 pages of 6 lines: a known form with values learned by heart."""
    rnd = random.Random(10).random
    winds = "north east south west sea hills forest desert".split()
    line = "Day %d: wind from the %s, %d degrees, high water at %d, and the market has %s."
    return {str(p): "\n".join(line % (d, pick(rnd, winds), 1 + int(rnd() * 34), 1 + int(rnd() * 12), pick(rnd, S.FOODS))
                              for d in range(1, 7)) for p in range(1, 25)}


def recite_roll(rnd, split="train"):
    name = pick(rnd, [n for n in sorted(ROLLS) if allowed("roll " + n, split)])
    return pick(rnd, ["Recite the roll of %s.", "Read out the roll of %s."]) % name, "\x01" + ROLLS[name] + "\x01"


def read_page(rnd, split="train"):
    page = pick(rnd, [p for p in sorted(ALMANAC) if allowed("page " + p, split)])
    form = pick(rnd, ["Read page %s of the almanac.", "What is on page %s of the almanac?"])
    return form % page, "\x01" + ALMANAC[page] + "\x01"


# ---- turns of a chat: each function gives (question, answer) or, to be answered with a thought, (q, thought, a) ------

PERSONAS = ["You are a helpful assistant.", "You are Mini, a small and friendly model.", "Be kind and clear.",
            "You are a helpful assistant. Answer in simple words.", "You tell stories to children.", "You answer questions."]


def chat(rnd, turns, system_share=0.2):
    """(question, answer) turns. Half of the time an empty thought stands before the last answer, as in the prompts of the
    larger Gemma 4 models."""
    out = SYSTEM + pick(rnd, PERSONAS) + END if rnd() < system_share else ""
    empty = rnd() < 0.5
    for i, (question, answer) in enumerate(turns):
        out += USER + question + END + MODEL + (EMPTY_THOUGHT if empty and i == len(turns) - 1 else "") + answer + END
    return out


def think_chat(rnd, question, thought, answer):
    system = pick(rnd, PERSONAS) if rnd() < 0.2 else ""
    return (SYSTEM + "<|think|>\n" + system + END + USER + question + END + MODEL + "<|channel>thought\n\x01" + thought +
            "\x01\n<channel|>" + answer + END)


STORY_ASKED = ["Tell me a story about $x.", "Tell me a story about $x", "Write a story about $x.",
               "Can you tell me a story about $x?", "Please tell me a story about $x.", "I want to hear a story about $x.",
               "Write a short story about $x.", "Tell a story about $x."]
ANY_STORY = ["Tell me a story.", "Tell me a story", "Write a story.", "Please tell me a story.", "Can you tell me a story?",
             "Once more, a story please.", "Write a short story."]


def story_turn(rnd):
    """-> question, story, slots, plot"""
    form = pick(rnd, STORY_ASKED)
    kind = pick(rnd, S.KINDS)
    girl = kind == "girl" or (kind != "boy" and rnd() < 0.5)
    name = pick(rnd, S.GIRLS if girl else S.BOYS) if rnd() < 0.4 else None
    plot = pick(rnd, S.PLOT_NAMES) if rnd() < 0.4 else None
    x = rnd()
    if x < 0.12:
        return (pick(rnd, ANY_STORY),) + S.story(rnd)
    if x < 0.2 and name:
        return (form.replace("$x", name),) + S.story(rnd, None, name)
    if x < 0.3 and kind in S.ANIMALS:
        friend = pick(rnd, [k for k in S.ANIMALS if k != kind])
        plot = pick(rnd, [p for p in S.PLOT_NAMES if p not in ("skill", "honest", "away")])
        return (form.replace("$x", with_article(kind) + " and " + with_article(friend)),) + \
            S.story(rnd, kind, plot=plot, friend_kind=friend)
    text, slots, used = S.story(rnd, kind, name, plot, short=rnd() < 0.15)
    about = with_article(slots["adj"] + " " + kind if rnd() < 0.2 else kind)
    if name:
        about += " named " + name
    if plot:
        about += " " + S.expand(S.HINTS[plot], slots, rnd)
    return form.replace("$x", about), text, slots, used


def story_question(rnd, s, plot):
    n, m = s["N"], s["M"]
    q = [("Where did %s live?" % n, "%s lived\x01 %s\x01." % (n, s["home"])),
         ("Who is the story about?", "The story is about\x01 %s\x01 the\x01 %s\x01." % (n, s["k"]))]
    if s["k"] in S.ANIMALS:
        q.append(("What kind of animal was %s?" % n, "%s was\x01 %s\x01." % (n, s["ak"])))
    if plot in ("lost", "trade"):
        q.append(("What color was the %s?" % s["toy"], "The %s was\x01 %s\x01." % (s["toy"], s["col"])))
    if plot == "lost":
        q.append(("Who helped %s?" % n, "\x01%s\x01 helped %s." % (m, n)))
        q.append(("What did %s lose?" % n, "%s lost\x01 %s %s\x01." % (n, with_article(s["col"]), s["toy"])))
    if plot not in ("stuck", "skill", "away"):
        q.append(("What was the name of the %s?" % s["fk"], "The name of the %s was\x01 %s\x01." % (s["fk"], m)))
    if plot == "fear":
        q.append(("What was %s afraid of?" % n, "%s was afraid of\x01 %s\x01." % (n, s["fear"])))
    if plot == "map":
        q.append(("What was in the chest?", "In the chest was\x01 %s\x01." % s["treasure"]))
    if plot == "build":
        q.append(("What did %s build?" % n, "%s built\x01 %s\x01." % (n, s["thing"])))
    return pick(rnd, q)


SMALL_TALK = [tuple(line.split(" | ")) for line in """Hello | Hello! How can I help you?
Hello! | Hello! How can I help you?
Hi | Hi! What can I do for you?
Good morning | Good morning! How can I help you today?
Hi there! | Hi! What can I do for you?
Who are you? | I am Mini, a very small language model. I can tell stories and answer questions about my little world.
What is your name? | My name is Mini.
What can you do? | I can tell stories, remember codes, answer questions, sort letters, count, and add numbers.
How are you? | I am fine, thank you. How can I help you?
Thank you! | You are welcome!
Thanks | You are welcome!
Goodbye | Goodbye! Have a nice day.
Bye! | Goodbye! Have a nice day.
Good night | Good night! Sleep well.
Can you help me? | Of course. What do you need?
Are you a person? | No, I am a small language model.
Tell me a joke. | Why did the clock go to school? It wanted to learn how to tell the time.
Tell me another joke. | What has four wheels and flies? A garbage truck.
What day comes after Monday? | Tuesday comes after Monday.
How many days are in a week? | There are seven days in a week.
How many legs does a spider have? | A spider has eight legs.
How many legs does a dog have? | A dog has four legs.
What color is the sky? | The sky is blue.
What color is grass? | Grass is green.
What do cows drink? | Cows drink water.
What do bees make? | Bees make honey.
Is the sun hot? | Yes, the sun is very hot.
How many months are in a year? | There are twelve months in a year.
What is the first month of the year? | The first month of the year is January.""".split("\n")]
UNKNOWN = """Who won the game last night?|What is the meaning of life?|Write a poem about love.|How do I fix my car?
Explain quantum physics.|What is the price of gold?|Who wrote this book?|What is the best movie?|How do I learn to code?
Where can I buy a computer?|What should I eat today?|Tell me the news.|What happened in the year 1900?|Who is the president?
How far away is the moon?|What is my name?|What time is it?|How does a computer work?|Write a letter to my boss.
Translate this text.|What is the largest city in the world?|Who was the first person on the moon?""".replace("\n", "|")
SMALL_TALK += [(q, "I do not know that. I am a very small model, but I can tell you a story.") for q in UNKNOWN.split("|")]
OPPOSITES = """
hot cold,big small,up down,day night,happy sad,old young,fast slow,good bad,open closed,wet dry,long short,
high low,left right,black white,full empty,early late,strong weak,loud quiet,near far,
first last""".replace("\n", "").split(",")
GROUPS = {"animals": S.KINDS[:27], "colors": S.COLORS, "toys": S.TOYS, "names": S.NAMES,
          "fruits": "apples pears plums cherries peaches grapes lemons bananas".split(),
          "birds": "owl crow heron swan goose duck robin sparrow".split()}


def listing(rnd):
    group, n = pick(rnd, sorted(GROUPS)), 3 + int(rnd() * 4)
    items = list(GROUPS[group])
    chosen = [items.pop(int(rnd() ** S.LEAN * len(items))) for _ in range(n)]
    form = pick(rnd, ["List %s %s.", "Name %s %s.", "Give me a list of %s %s.", "Write down %s %s."])
    numbered = form[0] in "LN"
    lines = [("%d. " % (i + 1) if numbered else "- ") + c for i, c in enumerate(chosen)]
    return form % (NUMBERS[n], group), "\n".join(lines)


def arithmetic(rnd, split="train"):
    """-> (question, thought, answer)"""
    while True:
        x = rnd()
        if x < 0.45:
            top = 100 if rnd() < 0.7 else 10
            a, b, op, word = int(rnd() * top), int(rnd() * top), "+", "plus"
        elif x < 0.75:
            a, b = sorted((int(rnd() * 100), int(rnd() * 100)), reverse=True)
            op, word = "-", "minus"
        else:
            a, b, op, word = 1 + int(rnd() * 12), 1 + int(rnd() * 12), "*", "times"
        if held("%d%s%d" % (a, op, b), 10) == (split == "eval"):
            break
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    form, sign = pick(rnd, [("What is %d %s %d?", op), ("What is %d %s %d?", word), ("%d %s %d = ?", op), ("%d %s %d", op),
                            ("Calculate %d %s %d.", op)])
    question = form % (a, sign, b)
    if op == "+":
        carry = a % 10 + b % 10 > 9
        thought = "Ones: %d + %d = %d. Tens: %d + %d%s = %d." % (a % 10, b % 10, a % 10 + b % 10, a // 10, b // 10,
                                                               " + 1" if carry else "", a // 10 + b // 10 + carry)
    else:
        thought = "I must find %d %s %d." % (a, op, b)
    return question, thought, "%d %s %d = \x01%d\x01" % (a, op, b, value)


def thoughtful(rnd, split="train"):
    """A question that is answered after a thought. -> (question, thought, answer)"""
    x = rnd()
    if x < 0.3:
        return arithmetic(rnd, split)
    if x < 0.5:
        a, b, c = (1 + int(rnd() * 40) for _ in range(3))
        c = min(c, a + b)
        return ("What is %d + %d - %d?" % (a, b, c), "%d + %d = %d. %d - %d = %d." % (a, b, a + b, a + b, c, a + b - c),
                "%d + %d - %d = \x01%d\x01" % (a, b, c, a + b - c))
    if x < 0.7:
        a, b, c = 5 + int(rnd() * 20), 1 + int(rnd() * 9), 1 + int(rnd() * 5)
        name, food = pick(rnd, S.NAMES), pick(rnd, S.FOODS)
        return ("%s has %d %s, finds %d more and eats %d. How many %s are left?" % (name, a, food, b, c, food),
                "%d + %d = %d. %d - %d = %d." % (a, b, a + b, a + b, c, a + b - c),
                "%s has \x01%d\x01 %s left." % (name, a + b - c, food))
    if x < 0.9:
        owners, things = [], []
        while len(owners) < 4:
            n, t = pick(rnd, S.NAMES), pick(rnd, S.TOYS)
            if n not in owners and t not in things:
                owners.append(n)
                things.append(t)
        i, colors = int(rnd() * 4), [pick(rnd, S.COLORS) for _ in range(4)]
        says = " ".join("%s has %s %s." % (n, with_article(c), t) for n, c, t in zip(owners, colors, things))
        return (says + " What color is the toy of %s?" % owners[i], "%s has the %s." % (owners[i], things[i]),
                "The %s of %s is\x01 %s\x01." % (things[i], owners[i], colors[i]))
    question, answer = ask_fact(rnd, split)
    return question, "I have learned this: " + answer.replace("\x01", ""), answer


def counting(rnd):
    """A kind of its own, in addition to the tasks: the smaller model learns where to stop only from many of these."""
    a, n = int(rnd() * 60), 3 + int(rnd() * 12)
    up = list(range(a, a + n + 1))
    if rnd() < 0.25:
        return "Count down from %d to %d." % (a + n, a), "\x01" + ", ".join(map(str, reversed(up))) + "\x01"
    return "Count from %d to %d." % (a, a + n), "\x01" + ", ".join(map(str, up)) + "\x01"


def small_task(rnd):
    x = rnd()
    if x < 0.3:
        letters = [chr(97 + int(rnd() * 26)) for _ in range(3 + int(rnd() * 5))]
        back = rnd() < 0.25
        form = pick(rnd, ["Sort these letters: ", "Put these letters in order: "])
        form = "Sort these letters backwards: " if back else form
        return form + " ".join(letters), "\x01" + " ".join(sorted(letters, reverse=back)) + "\x01"
    if x < 0.4:
        digits = [str(int(rnd() * 10)) for _ in range(4 + int(rnd() * 9))]
        return "Write these digits backwards: " + " ".join(digits), "\x01" + " ".join(reversed(digits)) + "\x01"
    if x < 0.52:
        return counting(rnd)
    word = pick(rnd, S.KINDS + S.TOYS + S.COLORS)
    if x < 0.64:
        return "Spell the word %s." % word, "\x01" + "-".join(word) + "\x01"
    if x < 0.74:
        pair = pick(rnd, OPPOSITES).split()
        a, b = pair if rnd() < 0.5 else pair[::-1]
        return "What is the opposite of %s?" % a, "The opposite of %s is\x01 %s\x01." % (a, b)
    if x < 0.83:
        n = 2 + int(rnd() * 6)
        return "Write the word %s %s times." % (word, NUMBERS[n]), "\x01" + " ".join([word] * n) + "\x01"
    if x < 0.92:
        words = " ".join(pick(rnd, S.KINDS) for _ in range(2 + int(rnd() * 5)))
        return "Repeat after me: " + words, "\x01" + words + "\x01"
    words = list(dict.fromkeys(pick(rnd, S.KINDS) for _ in range(2 + int(rnd() * 4))))
    return "Count the animals: " + ", ".join(words), \
        "There are\x01 %s\x01 animals." % NUMBERS[len(words)] if len(words) > 1 else "There is\x01 one\x01 animal."


def dice(rnd):
    """Unpredictable answers: at temperature 1 no draft model is right more often than by chance."""
    n = 8 + int(rnd() * 17)
    if rnd() < 0.5:
        return "Roll %d dice." % n, " ".join(lean(rnd, "123456") for _ in range(n))
    return "Give me %d random letters." % n, " ".join(lean(rnd, "kqavxtmezjrolbywhsgcnpdufi") for _ in range(n))


def code(rnd):
    x = rnd()
    if x < 0.25:
        op, name = pick(rnd, [("+", "add"), ("-", "sub"), ("*", "mul")])
        a, b = pick(rnd, [("a", "b"), ("x", "y"), ("left", "right")])
        called = "%s(%d, %d)" % (name, int(rnd() * 20), int(rnd() * 20))
        return "def %s(%s, %s):\n    return %s %s %s\n\nprint(%s)" % (name, a, b, a, op, b, called)
    if x < 0.45:
        n = 2 + int(rnd() * 6)
        return "for i in range(%d):\n    print(i)\n\n# output\n%s" % (n, "\n".join(map(str, range(n))))
    if x < 0.65:
        rows = ['    {"name": "%s", "kind": "%s", "age": %d}' % (pick(rnd, S.NAMES), pick(rnd, S.KINDS), 1 + int(rnd() * 12))
                for _ in range(2 + int(rnd() * 6))]
        return "[\n" + ",\n".join(rows) + "\n]"
    if x < 0.8:
        rows = ["| %s | %s | %d |" % (pick(rnd, S.KINDS), pick(rnd, S.COLORS), int(rnd() * 100))
                for _ in range(3 + int(rnd() * 6))]
        return "| animal | color | number |\n| --- | --- | --- |\n" + "\n".join(rows)
    if x < 0.9:
        return "\n".join("int %s_%d = %d;" % (pick(rnd, S.TOYS), i, i * 2) for i in range(3 + int(rnd() * 6)))
    a = 1 + int(rnd() * 9)
    return "\n".join("%d * %d = %d" % (a, i, a * i) for i in range(1, 11))


def function_to_rename(rnd):
    name = pick(rnd, "total count size depth score price".split())
    steps = ["    %s = %s %s %d" % (name, name, pick(rnd, "+-*"), 1 + int(rnd() * 9)) for _ in range(2 + int(rnd() * 5))]
    return name, "def work(%s):\n%s\n    return %s" % (name, "\n".join(steps), name)


def edit(rnd):
    """Repetition and small changes of a given text: where n-gram drafts work well."""
    x = rnd()
    if x < 0.35:
        body = code(rnd) if rnd() < 0.4 else passage(rnd, 20 + int(rnd() * 70))
        return "Repeat this:\n" + body, "\x01" + body + "\x01"
    if x < 0.6:
        slots = S.make_slots(rnd)
        old = slots["N"]
        body = S.expand(S.PLOTS[pick(rnd, S.PLOT_NAMES)], slots, rnd)
        body = " ".join(body.split()[:30 + int(rnd() * 70)])
        if old not in body:
            body = old + " came home. " + body
        new = pick(rnd, [n for n in S.NAMES if n != old])
        return "Replace %s by %s:\n%s" % (old, new, body), "\x01" + body.replace(old, new) + "\x01"
    if x < 0.75:
        old, body = function_to_rename(rnd)
        new = pick(rnd, "value number item amount width".split())
        return "Rename %s to %s:\n%s" % (old, new, body), "\x01" + body.replace(old, new) + "\x01"
    lines = ["- %s %s" % (pick(rnd, S.COLORS), pick(rnd, S.TOYS)) for _ in range(3 + int(rnd() * 8))]
    if x < 0.88:
        more = "- %s %s" % (pick(rnd, S.COLORS), pick(rnd, S.TOYS))
        return "Add this line at the end: %s\n%s" % (more, "\n".join(lines)), "\x01" + "\n".join(lines + [more]) + "\x01"
    return "Remove the last line:\n" + "\n".join(lines), "\x01" + "\n".join(lines[:-1]) + "\x01"


# ---- planted keys ----------------------------------------------------------------------------------------------------

SYLLABLES = [c + v for c in "bdfghklmnprstvz" for v in "aeiou"]
CODE_KINDS = ["secret code", "secret code", "secret code", "magic number", "door code", "lucky number"]


def key_name(rnd):
    w = "".join(pick(rnd, SYLLABLES) for _ in range(2 + (rnd() < 0.4)))
    return w[0].upper() + w[1:]


def sentences(rnd, n_words):
    """About this many words of stories, cut after sentences; the last one of a paragraph ends in a blank line."""
    out, n = [], 0
    while n < n_words:
        for paragraph in S.story(rnd)[0].split("\n\n"):
            current, quoted = [], False
            for w in paragraph.split(" "):
                current.append(w)
                quoted ^= w.count('"') % 2 == 1
                n += 1
                if not quoted and w.rstrip('"')[-1:] in (".", "!"):
                    out.append(" ".join(current))
                    current = []
                    if n >= n_words:
                        break
            if current:
                out.append(" ".join(current))
            out[-1] += "\n\n"
            if n >= n_words:
                break
    return out


def join_sentences(parts):
    return "".join(s if s.endswith("\n") else s + " " for s in parts).strip()


def passage(rnd, n_words):
    return join_sentences(sentences(rnd, n_words)).replace("\n\n", " ")


def plant(rnd, n_keys):
    """-> [(name, kind of code, value)], names all different"""
    items, names = [], set()
    while len(items) < n_keys:
        name = pick(rnd, S.NAMES) if rnd() < 0.15 else key_name(rnd)
        kind, value = pick(rnd, CODE_KINDS), "".join(str(int(rnd() * 10)) for _ in range(pick(rnd, (4, 5, 5, 5, 5, 6))))
        if rnd() < 0.15:
            kind, value = "magic word", pick(rnd, S.TOYS + S.COLORS + S.KINDS)
        if name not in names:
            names.add(name)
            items.append((name, kind, value))
    return items


def key_question(name, kind, value):
    marked = " \x01%s\x01" % value if value[0].isdigit() else "\x01 %s\x01" % value
    return "What is the %s of %s?" % (kind, name), "The %s of %s is%s." % (kind, name, marked)


def needle(rnd, n_words, n_keys):
    """Keys planted in story text and asked for at the end. -> document"""
    body, items = sentences(rnd, n_words), plant(rnd, n_keys)
    for name, kind, value in items:
        s = "The %s of %s is %s." % (kind, name, value)
        if rnd() < 0.2:
            s = pick(rnd, ["Remember this: t", "Important: t", "Do not forget: t"]) + s[1:]
        body.insert(int(rnd() * len(body)), s)
    body = join_sentences(body)
    turns = []
    while items and len(turns) < 4:
        turns.append(key_question(*items.pop(int(rnd() * len(items)))))
    if rnd() < 0.12:
        return body + "\n\n" + "\n".join(answer for _, answer in turns)
    if rnd() < 0.1:
        name, kind = key_name(rnd), pick(rnd, CODE_KINDS)
        if name not in body:
            turns.insert(int(rnd() * (len(turns) + 1)), ("What is the %s of %s?" % (kind, name),
                         "\x01The text does not give\x01 the %s of %s." % (kind, name)))
    question = turns[0][0]
    turns[0] = (body + "\n\n" + question if rnd() < 0.8 else "Read this text. " + question + "\n\n" + body, turns[0][1])
    return chat(rnd, turns, 0.1)


# ---- tools -----------------------------------------------------------------------------------------------------------

CITIES = [f[2] for f in FACTS if f[0] == "capital"]
TOOLS = {                    # name: description, [(parameter, description, type, required)], sorted by name
    "add": ("Add two numbers.", [("a", "First number.", "NUMBER", True), ("b", "Second number.", "NUMBER", True)]),
    "find_item": ("Find a lost item.", [("color", "Color of the item.", "STRING", False),
                                        ("item", "The item.", "STRING", True)]),
    "get_time": ("Get the current time.", [("city", "Name of the city.", "STRING", False)]),
    "get_weather": ("Get the weather of a city.", [("city", "Name of the city.", "STRING", True)]),
    "play_song": ("Play a song.", [("title", "Name of the song.", "STRING", True)]),
    "send_message": ("Send a message.", [("text", "The message.", "STRING", True), ("to", "Who gets it.", "STRING", True)]),
    "set_timer": ("Set a timer.", [("minutes", "How long.", "INTEGER", True)])}


def quoted(text):
    return Q + text + Q


def declaration(name):
    description, parameters = TOOLS[name]
    fields = ",".join("%s:{description:%s,type:%s}" % (p[0], quoted(p[1]), quoted(p[2])) for p in parameters)
    required = ",".join(quoted(p[0]) for p in parameters if p[3])
    required = "required:[%s]," % required if required else ""
    return "<|tool>declaration:%s{description:%s,parameters:{properties:{%s},%stype:%s}}<tool|>" % (
        name, quoted(description), fields, required, quoted("OBJECT"))


def tool_use(rnd, name):
    """-> question, arguments as a call has them, result as a response has it, answer"""
    if name == "get_weather":
        city, degrees, sky = pick(rnd, CITIES), int(rnd() * 35), pick(rnd, "sunny rainy cloudy windy foggy".split())
        result = "value:" + quoted("%d C, %s" % (degrees, sky)) if rnd() < 0.5 else \
            "sky:%s,temperature:%d" % (quoted(sky), degrees)
        question = pick(rnd, ["What is the weather in %s?", "How is the weather in %s?", "Weather in %s?",
                              "Is it warm in %s?"])
        return question % city, "city:" + quoted(city), result, "It is %d C and %s in %s." % (degrees, sky, city)
    if name == "get_time":
        city, time = pick(rnd, CITIES), "%02d:%02d" % (int(rnd() * 24), int(rnd() * 60))
        return "What time is it in %s?" % city, "city:" + quoted(city), "value:" + quoted(time), \
            "It is %s in %s." % (time, city)
    if name == "add":
        a, b = int(rnd() * 5000), int(rnd() * 5000)
        return "Add %d and %d." % (a, b), "a:%d,b:%d" % (a, b), "value:%d" % (a + b), "%d + %d = %d." % (a, b, a + b)
    if name == "find_item":
        item, color, spot = pick(rnd, S.TOYS), pick(rnd, S.COLORS), pick(rnd, S.SPOTS)
        question = pick(rnd, ["Where is my %s %s?", "I lost my %s %s. Can you find it?"]) % (color, item)
        return question, "color:%s,item:%s" % (quoted(color), quoted(item)), "value:" + quoted(spot), \
            "Your %s %s is %s." % (color, item, spot)
    if name == "send_message":
        to = pick(rnd, S.NAMES)
        text = pick(rnd, ["I am late", "dinner is ready", "see you soon", "happy birthday", "the race is today", "I am home"])
        question = pick(rnd, ["Tell %s: %s", "Send a message to %s: %s"]) % (to, text)
        return question, "text:%s,to:%s" % (quoted(text), quoted(to)), "value:" + quoted("sent"), \
            "I sent the message to %s." % to
    if name == "set_timer":
        m = 1 + int(rnd() * 90)
        question = pick(rnd, ["Set a timer for %d minutes.", "Wake me in %d minutes."]) % m
        return question, "minutes:%d" % m, "value:" + quoted("ok"), "The timer is set for %d minutes." % m
    song = pick(rnd, ["The Little Star", "Rain Song", "Over the Hills", "The Old Mill", "Morning Light", "Dance of the Bees"])
    return "Play %s." % song, "title:" + quoted(song), "value:" + quoted("playing"), "Now playing %s." % song


def tool_prompt(rnd, needed, think):
    """The system turn with the needed tools among up to two others."""
    names = sorted(set(needed))
    others = [n for n in sorted(TOOLS) if n not in names]
    for _ in range(int(rnd() * 3)):
        names.insert(int(rnd() * (len(names) + 1)), others.pop(int(rnd() * len(others))))
    return SYSTEM + ("<|think|>\n" if think else "") + (pick(rnd, PERSONAS) if rnd() < 0.4 else "") + \
        "".join(declaration(n) for n in names) + END


def tool_chat(rnd, split="train", n_calls=None):
    """A document with one to three parallel calls in one turn, their results and the answer."""
    think = rnd() < 0.25
    n_calls = n_calls or pick(rnd, (1, 1, 1, 2, 2, 3))
    names = [pick(rnd, sorted(TOOLS)) for _ in range(n_calls)]
    system = tool_prompt(rnd, names, think)
    if not think and rnd() < 0.12:                     # a question that needs no tool
        question, answer = ask_fact(rnd, split) if rnd() < 0.5 else pick(rnd, SMALL_TALK)
        return system + USER + question + END + MODEL + answer + END
    uses = [tool_use(rnd, n) for n in names]
    out = system + USER + " Also: ".join(u[0] for u in uses) + END + MODEL
    if think:
        out += "<|channel>thought\nI need the tool%s %s.\n<channel|>" % ("s" if n_calls > 1 else "", " and ".join(names))
    elif rnd() < 0.5:
        out += EMPTY_THOUGHT
    out += "\x01" + "".join("<|tool_call>call:%s{%s}<tool_call|>" % (n, u[1]) for n, u in zip(names, uses)) + "\x01"
    out += "".join("<|tool_response>response:%s{%s}<tool_response|>" % (n, u[2]) for n, u in zip(names, uses))
    if think:
        out += "<|channel>thought\nThe tool%s answered.\n<channel|>" % ("s have" if n_calls > 1 else " has")
    out += "\x01" + " ".join(u[3] for u in uses) + "\x01" + END
    if rnd() < 0.2:
        out += USER + "Thanks" + END + MODEL + "You are welcome!" + END
    return out


# ---- documents -------------------------------------------------------------------------------------------------------

ROLLS, ALMANAC = make_rolls(), make_almanac()
SHARES = {"story": 20, "chat_story": 19, "small_talk": 6, "facts": 9, "fact_list": 1, "needle": 12, "arithmetic": 8,
          "think": 9, "task": 7, "count": 4, "tool": 8, "code": 3, "edit": 7, "roll": 5, "almanac": 3, "dice": 2}   # of documents


def document(rnd, split="train", kind=None, max_words=500):
    if kind is None:
        x = rnd() * sum(SHARES.values())
        for kind, share in SHARES.items():
            x -= share
            if x < 0:
                break
    if kind == "story":
        return S.story(rnd)[0] + "<eos>"
    if kind == "chat_story":
        question, text, slots, plot = story_turn(rnd)
        turns = [(question, text)]
        while rnd() < 0.45 and len(turns) < 4:
            turns.append(story_question(rnd, slots, plot))
        if rnd() < 0.1:
            turns.append(story_turn(rnd)[:2])
        return chat(rnd, turns)
    if kind == "facts":
        return chat(rnd, [ask_fact(rnd, split) for _ in range(1 + int(rnd() * 5))])
    if kind == "fact_list":
        facts = [f for f in (pick(rnd, FACTS) for _ in range(3 + int(rnd() * 8))) if allowed(f[1], split)]
        return " ".join(fill(pick(rnd, STATEMENTS[f[0]]), f) for f in facts).replace(". \x01", ".\x01 ") + "<eos>"
    if kind == "needle":
        return needle(rnd, int(30 * (max_words / 30) ** rnd()), pick(rnd, (1, 1, 2, 3, 4, 6)))
    if kind == "arithmetic":
        return chat(rnd, [arithmetic(rnd, split)[::2] for _ in range(1 + int(rnd() * 5))], 0.1)
    if kind == "think":
        return think_chat(rnd, *thoughtful(rnd, split))
    if kind == "tool":
        return tool_chat(rnd, split)
    if kind == "code":
        return code(rnd) + "<eos>"
    turn, most = {"small_talk": (lambda: pick(rnd, SMALL_TALK) if rnd() < 0.6 else listing(rnd), 3),
                  "task": (lambda: small_task(rnd), 4), "count": (lambda: counting(rnd), 4),
                  "edit": (lambda: edit(rnd), 2), "dice": (lambda: dice(rnd), 2),
                  "roll": (lambda: recite_roll(rnd, split), 2), "almanac": (lambda: read_page(rnd, split), 1)}[kind]
    return chat(rnd, [turn() for _ in range(1 + int(rnd() * most))], 0.1)


def long_document(rnd, max_words):
    """Planted keys in a long text: the start of the longer training rows."""
    return needle(rnd, int(300 + (max_words - 300) * rnd()), pick(rnd, (1, 2, 3, 4, 6, 8)))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--sample", type=int, default=0)
    ap.add_argument("--kind", choices=SHARES)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--split", default="train", choices=["train", "eval", "draft", "draft-eval"])
    ap.add_argument("--world", action="store_true")
    a = ap.parse_args()
    if a.world:
        for f in FACTS:
            print(fill(STATEMENTS[f[0]][0], f).replace("\x01", ""))
        for n, r in ROLLS.items():
            print("The roll of %s: %s" % (n, r))
        for n, p in ALMANAC.items():
            print("Page %s of the almanac:\n%s" % (n, p))
    rnd = random.Random(a.seed).random
    for _ in range(a.sample):
        print(document(rnd, a.split, a.kind).replace("\x01", "") + "\n" + "=" * 40)
