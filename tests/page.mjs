// page.mjs - web/index.html in a real browser (Debian's chromium, driven by playwright-core), served by a real server. Where a
// test needs an exact answer, or one that stops in the middle, it puts a stub in place of fetch and sends the pieces itself.
//   node tests/page.mjs URL KEY CLIENTS [SEEING]  CLIENTS: the folder where npm put playwright-core and axe-core
//                                                 SEEING: the address of a server with an image tower, which the one at URL lacks
// Prints "FAILED: .." for what went wrong, and "# page: N passed, N failed". SHOTS=DIR writes screenshots there, TIMES=1 says how
// long each group takes, GROUP=NAME runs only that one.
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { resolve } from 'node:path';

const [address, key, clients, ...others] = process.argv.slice(2);
const [url, seeing = url] = [address, ...others].map(a => a.replace(/\/*$/, '/'));
const require = createRequire(resolve(clients, 'index.js'));
const { chromium } = require('playwright-core');
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8');
const html = readFileSync('web/index.html', 'utf8');
let passed = 0, failed = 0;

function check(name, ok, got) {
    if (ok) return void passed++;
    failed++;
    console.log(`FAILED: ${name}${got === undefined ? '' : `: got ${JSON.stringify(got)}`}`);
}
const same = (name, got, want) => check(name, JSON.stringify(got) === JSON.stringify(want), got);

// ---- the browser ----
const browser = await chromium.launch({ executablePath: ['/usr/bin/chromium', '/usr/local/bin/chromium'].find(existsSync),
    args: ['--disable-dev-shm-usage', ...(process.getuid() === 0 ? ['--no-sandbox'] : [])] });      // in containers
const complaints = [], outside = [];

async function newContext(options = {}) {
    const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
    context.setDefaultTimeout(60000);
    context.on('request', r => { if (!/^(data|blob):/.test(r.url()) && ![url, seeing].some(u => r.url().startsWith(u))) outside.push(r.url()); });
    await context.addInitScript(stub);
    await context.addInitScript(given => { if (given) sessionStorage.setItem('gemma4.key', given); }, options.locked ? '' : key);
    return context;
}

// In the page: window.stub answers requests for a completion while stub.on is true.
function stub() {
    const real = window.fetch, encoder = new TextEncoder();
    const event = (delta, finish_reason = null, stop_reason) =>
        `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason, stop_reason }] })}\n\n`;
    let out;
    const s = window.stub = {
        on: false, bodies: [], status: 200,
        raw: text => out.enqueue(encoder.encode(text)),
        say: content => s.raw(event({ content })),
        think: reasoning_content => s.raw(event({ reasoning_content })),
        end: (finish = 'stop', why) => { s.raw(`${event({}, finish, why)}data: [DONE]\n\n`); out.close(); },
        cut: () => out.error(new TypeError('network error')),
    };
    window.fetch = (path, options) => {
        if (!s.on || !String(path).endsWith('completions')) return real(path, options);
        s.bodies.push(JSON.parse(options.body));
        if (s.status !== 200) return Promise.resolve(new Response('{"error":{"message":"no"}}', { status: s.status }));
        const body = new ReadableStream({ start(controller) { out = controller; } });
        options.signal.addEventListener('abort', () => out.error(new DOMException('stopped', 'AbortError')));
        return Promise.resolve(new Response(body, { headers: { 'Content-Type': 'text/event-stream' } }));
    };
}

async function newPage(context, address = '', server = url) {
    const page = await context.newPage();
    page.on('console', m => { if (m.type() === 'error' && !/status of (400|401|50\d)/.test(m.text())) complaints.push(m.text()); });
    page.on('pageerror', e => complaints.push(e.stack));
    page.on('dialog', d => d.accept(page.reply));
    await open(page, server + address);
    return page;
}

async function open(page, address) {
    await page.goto(address);
    await ready(page);
}
const ready = page => page.waitForFunction(() => document.getElementById('model').textContent);
const idle = page => page.waitForFunction(() =>
    !current.task && !$('log').querySelector('[aria-busy=true]') && $('send').textContent === 'Send');
const texts = (page, selector) => page.locator(selector).allInnerTexts();
const shown = async page => (await texts(page, 'article .content')).map(t => t.trim());
const tool = (page, label, n = -1) => page.locator('article').nth(n).getByRole('button', { name: label });
const has = (page, text) => page.waitForFunction(t => document.body.innerText.includes(t), text);
async function until(what) {
    for (let i = 0; i < 1200 && !await what(); i++) await new Promise(r => setTimeout(r, 50));
}
const saw = (page, f, arg) => page.waitForFunction(f, arg).then(() => true, () => false);
const stubbed = page => page.evaluate(() => { stub.on = true; });
const say = (page, text) => page.evaluate(t => stub.say(t), text);
const end = async (page, ...why) => { await page.evaluate(w => stub.end(...w), why); await idle(page); };
const asks = (page, n) => page.waitForFunction(k => stub.bodies.length === k, n);
const shot = async (page, name) => { if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/${name}.png` }); };

async function send(page, text) {
    await page.fill('#input', text);
    await page.keyboard.press('Enter');
}

// Asks the stub; the answer is there when this returns.
async function exchange(page, question, answer) {
    const n = await page.evaluate(() => { stub.on = true; return stub.bodies.length; });
    await send(page, question);
    await asks(page, n + 1);
    await say(page, answer);
    await end(page);
}

async function group(name, run) {
    if (process.env.GROUP && !process.env.GROUP.includes(name)) return;
    const start = Date.now();
    try {
        await run();
    } catch (e) {
        check(`${name}: goes through`, false, e.stack.split('\n').slice(0, 4).join(' | '));
    }
    for (const context of browser.contexts()) await context.close();
    if (process.env.TIMES) console.log(`${name}: ${Date.now() - start} ms`);
}

// Drops files [name, text or bytes] on the page or pastes them, together with texts { type: text }.
const give = (page, how, files, texts = {}) => page.evaluate(([kind, list, more]) => {
    const data = new DataTransfer();
    for (const type in more) data.setData(type, more[type]);
    for (const [name, content] of list)
        data.items.add(new File([typeof content === 'string' ? content : new Uint8Array(content)], name,
            { type: { png: 'image/png', gif: 'image/gif', jpg: 'image/jpeg', txt: 'text/plain' }[name.slice(-3)] }));
    const options = { bubbles: true, cancelable: true };
    if (kind === 'drop') $('main').dispatchEvent(new DragEvent('drop', { ...options, dataTransfer: data }));
    else $('input').dispatchEvent(new ClipboardEvent('paste', { ...options, clipboardData: data }));
}, [how, files, texts]);

// The bytes of a PNG file of one color.
const png = (page, width, height, color) => page.evaluate(([w, h, fillStyle]) => {
    const canvas = Object.assign(document.createElement('canvas'), { width: w, height: h });
    Object.assign(canvas.getContext('2d'), { fillStyle }).fillRect(0, 0, w, h);
    return canvas.toDataURL();
}, [width, height, color]).then(url => [...Buffer.from(url.split(',')[1], 'base64')]);

async function audit(page, name, rules) {
    await page.evaluate(axe);
    const options = { resultTypes: ['violations'], ...(rules && { runOnly: rules }) };
    const { violations } = await page.evaluate(o => window.axe.run(o), options);
    same(`axe: ${name}`, violations.map(v => `${v.id}: ${v.nodes.map(n => n.target).slice(0, 3)}`), []);
}

// ---- the file ----
check('no way from text to HTML', !/innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function/.test(html));
check('no handlers in the HTML', !/<[^>]*\son\w+=/.test(html.slice(0, html.indexOf('<script>'))));
check('under 90 KB', html.length < 90000, html.length);
const contents = [...html.slice(0, html.indexOf('<html')).matchAll(/\[(\d+)\]\s+(.*?)\s*(?=\[\d|\n|-->)/g)].map(m => `${m[1]} ${m[2]}`);
const sections = [...html.matchAll(/==== \[(\d+)\] (.*?) ====/g)].map(m => `${m[1]} ${m[2]}`);
same('the table of contents has the sections', contents.sort(), sections.sort());

// ---- a conversation with the server ----
await group('server', async () => {
    const page = await newContext({ locked: true }).then(c => c.newPage());
    page.on('dialog', d => d.accept());
    await page.goto(url);
    await page.waitForSelector('#key[open]');
    await page.fill('#key-field', 'another');
    await page.keyboard.press('Enter');
    await page.waitForFunction(() => $('key-notice').textContent === 'Wrong API key.');
    await page.fill('#key-field', key);
    await page.keyboard.press('Enter');
    await ready(page);
    check('the model is named', (await page.textContent('#model')).includes('gemma4-mini'));
    const storages = await page.evaluate(() => [sessionStorage['gemma4.key'], JSON.stringify(localStorage)]);
    same('the key is kept for this tab only', storages, [key, '{}']);

    await page.evaluate(() => Object.assign(current.settings, { temperature: 0, max_tokens: 12 }));
    await send(page, 'Tell me a story about a fox.');
    await page.waitForSelector('article.assistant');
    await idle(page);
    const [, first] = await shown(page);
    check('an answer', /^Once upon a time/.test(first), first);
    check('why it ended', /reached the maximum tokens/.test(await page.innerText('#log')));
    await page.evaluate(() => { current.settings.stop = ' a \n little'; });
    await tool(page, 'Regenerate').click();
    await has(page, 'Ended at the stop string " a ".');
    passed++;
    await page.evaluate(() => { delete current.settings.stop; current.settings.grammar = 'root ::= "from a " ("grammar" | "list")'; });
    await idle(page);
    await tool(page, 'Regenerate').click();
    await has(page, '3/3');
    await idle(page);
    check('a grammar', /^from a (grammar|list)$/.test((await shown(page))[1]), await shown(page));
    await page.evaluate(() => { delete current.settings.grammar; });
    for (let i = 0; i < 2; i++) await tool(page, 'Previous version').click();
    check('figures', /12 tokens, .* tok\/s .*context \d+ of 8,192/.test(await page.innerText('#log')), await page.innerText('#log'));
    await tool(page, 'Continue').click();
    await idle(page);
    const [, longer, ...more] = await shown(page);
    check('Continue makes it longer', longer.startsWith(first) && longer.length > first.length + 10 && !more.length, longer);
    await page.evaluate(() => { current.settings.max_tokens = 24; });
    await tool(page, 'Regenerate').click();
    await has(page, '4/4');
    await idle(page);
    same('Continue went on as the model does', (await shown(page))[1], longer);
    await page.evaluate(() => { current.settings.max_tokens = 7000; current.settings.seed = 1; current.settings.temperature = 1; });
    await page.evaluate(() => {                        // an answer that does not end by itself
        const real = window.fetch;
        window.fetch = (path, o) => real(path, o?.body ? { ...o, body: o.body.replace('{', '{"ignore_eos":true,') } : o);
    });
    await tool(page, 'Regenerate').click();
    check('how fast it is, exactly', await saw(page, () => /Answering: [\d,]+ tokens, [\d.]+ tok\/s/.test($('log').innerText)));
    await page.keyboard.press('Escape');
    await idle(page);
    check('Escape stops', (await page.innerText('article:last-of-type')).includes('Stopped.'));
    await send(page, 'fox '.repeat(9000));
    await has(page, 'exceeds the model\'s context');
    check('a prompt that is too long: what to do', /larger context \(-c\)/.test(await page.innerText('#log')));
    await page.evaluate(() => sessionStorage.removeItem('gemma4.key'));
    await tool(page, 'Try again').click();
    await page.waitForSelector('#key[open]');
    await page.getByRole('button', { name: 'Cancel' }).click();
    check('a key that is not given', await saw(page, () => $('log').innerText.includes('requires an API key')));
});

// ---- Markdown ----
await group('Markdown', async () => {
    const page = await newPage(await newContext());
    const render = list => page.evaluate(all => all.map(text => {
        const brief = n => {
            if (n.nodeType === 3) return n.data;
            if (n.localName === 'button' && n.className === 'small') return '';
            const inner = [...n.childNodes].map(brief).join('');
            return n.localName === 'span' && !n.className ? inner : `<${n.localName}${n.href ? ` ${n.href}` : ''}>${inner}</${n.localName}>`;
        };
        const whole = document.createElement('div'), grown = document.createElement('div');
        showMarkdown(whole, text);
        for (let i = 1; i <= text.length; i++) showMarkdown(grown, text.slice(0, i));          // as a stream
        return [[...whole.childNodes].map(brief).join(''), grown.innerHTML === whole.innerHTML || grown.innerHTML];
    }), list);
    const code = (language, text) => `<div><div>${language}</div><pre><code>${text}</code></pre></div>`;
    const cases = [
        ['one\ntwo\n\nthree', '<p>one<br></br>two</p><p>three</p>'],
        ['# A `b`\n###### c ##\n---\n#no', '<h3>A <code>b</code></h3><h4>c</h4><hr></hr><p>#no</p>'],
        ['**b** *i* ***both*** __b__ _i_ ~~s~~', '<p><strong>b</strong> <em>i</em> <strong><em>both</em></strong> <strong>b</strong> <em>i</em> <s>s</s></p>'],
        ['2 * 3 * 4, snake_case_name, a**, \\*no\\*, w.__x=1 w.__x', '<p>2 * 3 * 4, snake_case_name, a**, *no*, w.__x=1 w.__x</p>'],
        ['`` a`b `` `**` \\\\', '<p><code>a`b</code> <code>**</code> \\</p>'],
        ['<b>x</b><i onclick=1>y</i><script>alert(1)</script>', '<p><b>x</b><i onclick=1>y</i><script>alert(1)</script></p>'],
        ['[a *b*](https://x.org/a_(b)) ![i](http://x.org/i.png "t")', '<p><a https://x.org/a_(b)>a <em>b</em></a> <a http://x.org/i.png>i</a></p>'],
        ['[x](javascript:alert(1)) [y](data:text/html,1) [z](//x.org)', '<p>[x](javascript:alert(1)) [y](data:text/html,1) [z](//x.org)</p>'],
        ['see https://x.org/a. or <http://y.org>!', '<p>see <a https://x.org/a>https://x.org/a</a>. or <a http://y.org/>http://y.org</a>!</p>'],
        ['a<br>b  \nc<sub>2</sub>', '<p>a<br></br>b<br></br>c<sub>2</sub></p>'],
        ['```txt now\nif (a < b)\n\n  *c*\n```\nafter', code('txt', 'if (a < b)\n\n  *c*') + '<p>after</p>'],
        ['```\nnot closed\n``', code('', 'not closed\n``')], ['~~~\n```\n~~~', code('', '```')],
        ['a\n\n    x\n\n      y\n\nb', '<p>a</p>' + code('', 'x\n\n  y') + '<p>b</p>'],
        ['- a\n- b\n  - c\n    more\n\n  d\n- [x] e\n\nend',
            '<ul><li>a</li><li>b<ul><li>c<br></br>more</li></ul><p>d</p></li><li>\u2611 e</li></ul><p>end</p>'],
        ['3. a\n   ```\n   x\n   ```\n4. b', '<ol><li>a' + code('', 'x') + '</li><li>b</li></ol>'],
        ['1. a\n\n2. b\n* c', '<ol><li>a</li><li>b</li></ol><ul><li>c</li></ul>'],
        ['> a\n> - b\nc', '<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>'],
        ['| a | b \\| c |\n|:--|--:|\n| 1 | `2` |\n| 3 |\n\nx', '<div><table><thead><tr><th>a</th><th>b | c</th></tr></thead><tbody><tr><td>1</td><td>' +
            '<code>2</code></td></tr><tr><td>3</td><td></td></tr></tbody></table></div><p>x</p>'],
        ['a | b\nc', '<p>a | b<br></br>c</p>'], ['a[^1]\n\n[^1]: the note', '<p>a<sup>1</sup></p><p><sup>1</sup>: the note</p>'], ['', ''],
    ];
    (await render(cases.map(([text]) => text))).forEach(([got, grown], i) => {
        same(`Markdown ${JSON.stringify(cases[i][0])}`, got, cases[i][1]);
        check(`Markdown ${JSON.stringify(cases[i][0])}, as a stream`, grown === true, grown);
    });

    // Math: as the text of the formula, with the elements that matter.
    const formulas = await page.evaluate(list => list.map(text => {
        const to = document.createElement('div');
        showMarkdown(to, text);
        const brief = n => {
            const inner = n.nodeType === 3 ? n.data : [...n.childNodes].map(brief).join('');
            if (n.nodeType === 3 || /^(mrow|math|m[ino]|mtext|p|span|mspace)$/.test(n.localName)) return inner;
            return n.localName + (inner && `(${inner})`);
        };
        return brief(to.firstChild);
    }), [
        '\\(\\frac{a}{b}+\\sqrt[3]{x_1^2}\\)', '$\\frac12 x^10$', '\\[\\sum_{i=1}^{n} i * j\\]', '$$\n\\int_0^1 f\'(x)\\,dx\n$$',
        '\\begin{cases} a & b \\\\ c & d \\end{cases}', '$\\left(\\hat{x}\\right)\\mathbb{R}$', '$\\text{if } \\sin x \\le 3.14$',
        'costs $5 and $6, or 7$', 'it is $5 million or $6 million', '$\\unknown x$', '\\(\\frac{a\\)', '\\[ a \\\\ b \\]', 'a\\$b\\$ $n-1$',
        '$$\\begin{aligned} a &= b \\\\ &= c \\end{aligned}$$', '$\\alpha\\to\\infty$ and $\\lim_{x \\to 0} x$ and `$a$`',
    ]);
    const wanted = [
        'mfrac(ab)+msup(3)\u221amsubsup(x12)', 'mfrac(12)msup(x1)0', 'munderover(\u2211i=1n)i\u2217j', 'msubsup(\u222b01)msup(f\u2032)(x)dx',
        '{mtable(mtr(mtd(a)mtd(b))mtr(mtd(c)mtd(d)))', '(mover(x^))\u211d', 'if\u00a0sinx\u22643.14', 'costs $5 and $6, or 7$',
        'it is $5 million or $6 million', '\\unknownx', 'code(\\(\\frac{a\\))', 'mtable(mtr(mtd(a))mtr(mtd(b)))', 'a$b$ n\u22121',
        'mtable(mtr(mtd(a)mtd(=b))mtr(mtdmtd(=c)))', '\u03b1\u2192\u221e and munder(limx\u21920)x and code($a$)',
    ];
    formulas.forEach((got, i) => same(`math ${i}`, got, wanted[i]));
    const programs = ['```py\ndef f(x): # "no"\n    return """a\n# b\n"""\n```', '```js\n/* a\nb */ const x = `1\n2`; // c\n```'];
    const colors = await page.evaluate(list => list.map(text => {
        const to = document.createElement('div');
        showMarkdown(to, text);
        return [...to.querySelectorAll('code span[class]')].map(n => `${n.className}:${n.textContent}`);
    }), programs);
    same('colors: Python', colors[0], ['word:def', 'call:f', 'comment:# "no"', 'word:return', 'string:"""a\n# b\n"""']);
    same('colors: JavaScript', colors[1], ['comment:/* a\nb */', 'word:const', 'string:`1\n2`', 'comment:// c']);
    const repeated = ['> ', '- ', '**a ', '[', '`', '_a ', '| a ', '![a](http://x(', '``` ', '\\', 'http://(', '*a **b ', '$a ', '\\(',
        '\\[', '$$', '<b>', '[^', `$${'a'.repeat(400)} `, ' '.repeat(999) + 'a'];
    check('code in a single long line', await page.evaluate(() => {
        const to = document.createElement('div');
        showMarkdown(to, '```js\n' + 'f(1);'.repeat(60000));
        return to.querySelector('code').textContent.length;
    }) === 300000);
    check('the same mark again and again ends', await page.evaluate(list => {
        for (const mark of list) showMarkdown(document.createElement('div'), mark.repeat(20000 / mark.length));
        return true;                                   // what takes for ever fails the suite
    }, repeated));
});

// ---- what a model says never runs; what is shown of everything ----
await group('zoo', async () => {
    const context = await newContext(), page = await newPage(context), zoo = readFileSync('tests/zoo.md', 'utf8');
    await page.evaluate(() => { stub.on = true; });
    await send(page, 'Show me everything');
    await asks(page, 1);
    await page.evaluate(text => { for (let i = 0; i < text.length; i += 37) stub.say(text.slice(i, i + 37)); }, zoo);
    await end(page);
    const active = 'main :is(img, iframe, svg, script, details:not(:has(.folded)))';
    same('no script of the model runs', await page.evaluate(s => [window.__x, document.querySelectorAll(s).length], active), [null, 0]);
    check('links lead to http and https', (await page.evaluate(() => [...document.querySelectorAll('.content a')].map(a => a.protocol + a.rel + a.target)))
        .every(s => /^https?:noopener noreferrer_blank$/.test(s)));
    check('math', await page.locator('math').count() === 4, await page.locator('math').count());
    const wrap = page.getByRole('button', { name: 'Wrap long lines' }).nth(1);
    await wrap.click();
    check('code wraps', await page.locator('.code pre').nth(1).evaluate(pre => pre.scrollWidth <= pre.clientWidth));
    await shot(page, 'desktop-end');
    await page.evaluate(() => { $('main').scrollTop = 0; });
    await shot(page, 'desktop');
    await audit(page, 'a conversation');
    await page.selectOption('#theme', 'dark');
    same('dark', await page.evaluate(() => getComputedStyle(document.body).backgroundColor), 'rgb(22, 24, 28)');
    await shot(page, 'dark');
    await audit(page, 'dark', ['color-contrast']);
    await page.click('#open-settings');
    await shot(page, 'settings');
    await audit(page, 'settings');
    await page.keyboard.press('Escape');
    await page.reload();
    await ready(page);
    same('the theme stays', await page.evaluate(() => document.documentElement.style.colorScheme), 'dark');
    await context.close();

    const phone = await newPage(await newContext({ viewport: { width: 360, height: 640 }, hasTouch: true, isMobile: true }));
    await phone.evaluate(() => { stub.on = true; });
    await phone.fill('#input', 'Show me everything');
    await phone.tap('#send');
    await asks(phone, 1);
    await phone.evaluate(text => stub.say(text), zoo);
    await end(phone);
    check('a phone shows the model', await phone.isVisible('#model'));
    await shot(phone, 'phone-end');
    await phone.evaluate(() => { $('main').scrollTop = 0; });
    await shot(phone, 'phone');
    const small = () => phone.evaluate(() => [...document.querySelectorAll('button, select, summary, input')].filter(n => {
        const { width, height } = n.getBoundingClientRect();
        return n.checkVisibility() && height && (width < 44 || height < 44);
    }).map(n => n.textContent || n.id));
    same('targets to touch are 44 px', await small(), []);
    check('nothing is wider than a phone', await phone.evaluate(() => document.documentElement.scrollWidth <= 360));
    await phone.tap('#menu');
    same('targets of the list are 44 px', await small(), []);
    await shot(phone, 'phone-menu');
    await audit(phone, 'a phone');
    await phone.keyboard.press('Escape');
    check('Escape closes the list', !await phone.isVisible('#nav'));
    await phone.setViewportSize({ width: 320, height: 480 });
    await phone.tap('#open-settings');
    await shot(phone, 'narrow-settings');
    check('nothing is wider than 320 px', await phone.evaluate(() => document.documentElement.scrollWidth <= 320));
});

// ---- nothing is lost ----
await group('versions', async () => {
    const page = await newPage(await newContext());
    await exchange(page, 'q', 'one');
    await page.evaluate(() => { stub.status = 500; });
    await tool(page, 'Regenerate').click();
    await page.waitForSelector('#log [role=alert]');
    same('Regenerate that fails leaves the old answer', await shown(page), ['q', 'one']);
    await page.evaluate(() => { stub.status = 200; });
    await tool(page, 'Regenerate').click();
    await asks(page, 3);
    same('the old answer is there until the new one begins', await shown(page), ['q', 'one', '']);
    await say(page, 'two');
    await page.waitForFunction(() => document.querySelectorAll('article').length === 2 && $('log').innerText.includes('two'));
    await page.evaluate(() => stub.cut());
    await idle(page);
    check('an answer that is cut says so', /connection was lost/.test(await page.innerText('#log')));
    await tool(page, 'Try again').click();
    await asks(page, 4);
    await say(page, 'three');
    await end(page);
    await has(page, '3/3');
    await tool(page, 'Previous version').click();
    same('an older version', await shown(page), ['q', 'two']);
    check('the focus stays on the button', await page.evaluate(() => document.activeElement.getAttribute('aria-label') === 'Previous version'));
    await page.keyboard.press('Enter');
    same('by keys', await shown(page), ['q', 'one']);
    await page.reload();
    await ready(page);
    same('versions survive a reload, and which one was shown', [await shown(page), await texts(page, '[role=status].small')], [['q', 'one'], ['1/3']]);

    await stubbed(page);
    await tool(page, 'Edit', 0).click();
    await page.locator('article textarea').fill('better');
    await page.getByRole('button', { name: 'Send as a new version' }).click();
    await asks(page, 1);
    await say(page, 'four');
    await end(page);
    same('an edit is a version', [await shown(page), (await texts(page, '[role=status].small'))], [['better', 'four'], ['2/2']]);
    same('the model sees only its version', await page.evaluate(() => stub.bodies.at(-1).messages), [{ role: 'user', content: 'better' }]);
    await tool(page, 'Edit', 1).click();
    await page.locator('article textarea').fill('five');
    await page.getByRole('button', { name: 'Save as a new version' }).click();
    same('an answer can be edited', await shown(page), ['better', 'five']);
    await exchange(page, 'next', 'six');
    same('the next request has the edit', await page.evaluate(() => stub.bodies.at(-1).messages[1]), { role: 'assistant', content: 'five' });
    await tool(page, 'Branch', 1).click();
    await has(page, '(branch)');
    same('a branch has the messages up to there', await shown(page), ['better', 'five']);
    await page.goBack();
    await page.waitForFunction(() => document.querySelectorAll('article').length === 4);
    await tool(page, 'Delete', 2).click();
    same('deleted with what follows', await shown(page), ['better', 'five']);
    await page.getByRole('button', { name: 'Undo' }).click();
    same('Undo', await shown(page), ['better', 'five', 'next', 'six']);
    await page.reload();
    await ready(page);
    same('Undo is stored', await shown(page), ['better', 'five', 'next', 'six']);
});

await group('two tabs', async () => {
    const context = await newContext(), a = await newPage(context);
    await exchange(a, 'q', 'one');
    const b = await newPage(context, await a.evaluate(() => location.hash));
    await stubbed(b);
    await tool(b, 'Edit', 0).click();
    await b.locator('article textarea').fill('a long careful edit');
    await b.fill('#input', 'draft of b');
    await send(a, 'from a');
    await asks(a, 2);
    await has(b, 'from a');
    check('the other tab sees that it is answered', await saw(b, () => $('send').textContent === 'Stop'));
    await b.evaluate(() => { current.elsewhere = Infinity; });           // however long this takes
    await b.focus('#input');
    await b.keyboard.press('Enter');
    check('Enter during an answer: it says that it waits', await b.isVisible('#queued') && await b.inputValue('#input') === 'draft of b');
    await say(a, 'answer to a');
    await a.evaluate(() => stub.end());
    await asks(b, 1);
    await say(b, 'answer to b');
    await end(b);
    const all = ['from a', 'answer to a', 'draft of b', 'answer to b'];
    await has(a, 'answer to b');
    same('both tabs have everything', [(await shown(a)).slice(2), (await shown(b)).slice(2)], [all, all]);
    same('an edit survives what the other tab does', await b.inputValue('article textarea'), 'a long careful edit');

    await a.fill('#input', 'draft a');
    await b.fill('#input', 'draft b');
    for (const page of [a, b]) { await page.reload(); await ready(page); await stubbed(page); }
    same('each tab has its own draft after a reload', [await a.inputValue('#input'), await b.inputValue('#input')], ['draft a', 'draft b']);
    same('and its edit', [await a.locator('article textarea').count(), await b.inputValue('article textarea')], [0, 'a long careful edit']);
    // both send before either hears of the other
    for (const page of [a, b]) await page.evaluate(() => { channel.onmessage = null; });
    for (const page of [a, b]) await page.evaluate(() => sendMessage(current) || null);
    await Promise.all([asks(a, 1), asks(b, 1)]);
    await say(a, 'at once a');
    await say(b, 'at once b');
    await a.evaluate(() => stub.end());
    await b.evaluate(() => stub.end());
    await Promise.all([idle(a), idle(b)]);
    for (const page of [a, b]) { await page.reload(); await ready(page); }
    const stored = await b.evaluate(() => recordsOf('messages', current.id).then(list => list.map(m => m.content)));
    const both = ['draft a', 'draft b', 'at once a', 'at once b'];
    check('two at once: all is stored', both.every(t => stored.includes(t)) && stored.length === 10, stored);

    // a draft of a tab that was closed
    await b.fill('#input', 'left behind');
    const address = await b.evaluate(() => location.hash);
    await b.close();
    const c = await newPage(context, address);
    check('the draft of a closed tab is taken up', await saw(c, () => $('input').value === 'left behind'));
    await a.evaluate(() => deleteChat(current));
    check('a chat that another tab deleted: the text stays', await saw(c, () => $('notice').innerText.includes('deleted in another tab')) &&
        await c.inputValue('#input').then(v => v.includes('left behind')), await c.inputValue('#input'));
});

await group('reload', async () => {
    const context = await newContext(), page = await newPage(context);
    await page.click('#new');
    await page.fill('#input', 'a draft of a new one');
    await page.reload();
    await ready(page);
    same('a draft survives a reload', await page.inputValue('#input'), 'a draft of a new one');
    await page.setInputFiles('#file', { name: 'a.txt', mimeType: 'text/plain', buffer: Buffer.from('in a file') });
    await has(page, 'a.txt');
    await page.reload();
    await ready(page);
    await has(page, 'a.txt');
    await stubbed(page);
    await page.keyboard.press('Enter');
    await asks(page, 1);
    same('files are sent', await page.evaluate(() => stub.bodies[0].messages.map(m => m.content)),
        ['a.txt:\n```\nin a file\n```\n\na draft of a new one']);
    await page.evaluate(() => stub.think('I think'));
    await say(page, 'half an answer');
    await has(page, 'half an answer');
    let warned = false;
    page.once('dialog', d => { warned = d.type() === 'beforeunload'; });
    await page.reload();
    await ready(page);
    check('a reload during an answer warns', warned);
    same('and what was there stays', (await shown(page)).slice(1), ['half an answer']);
    check('it says that it was interrupted', /Interrupted/.test(await page.innerText('#log')));
    await stubbed(page);
    await tool(page, 'Continue').click();
    await asks(page, 1);
    const rest = await page.evaluate(() => stub.bodies[0]);
    same('Continue asks for the rest', [rest.continue_final_message, rest.add_generation_prompt, rest.messages.at(-1)],
        [true, false, { role: 'assistant', content: 'half an answer', reasoning_content: 'I think' }]);
    await say(page, ', and the rest');
    await end(page);
    same('and it goes on in place', (await shown(page)).slice(1), ['half an answer, and the rest']);
    await page.fill('#input', 'draft one');
    await tool(page, 'Edit', 0).click();
    await page.locator('article textarea').fill('half an edit');
    await page.click('#new');
    await page.fill('#input', 'draft two');
    await page.locator('#list .open').first().click();
    await page.waitForFunction(() => $('input').value === 'draft one');
    check('switching keeps an edit', await saw(page, () => document.querySelector('article textarea')?.value === 'half an edit'));
    await page.goBack();
    check('switching keeps drafts', await saw(page, () => $('input').value === 'draft two'));
});

await group('store', async () => {
    const context = await newContext(), page = await newPage(context);
    const old = { id: 'old1', title: 'An old one', changed: 5, settings: { temperature: 0 }, messages: [{ role: 'user', content: 'before' },
        { role: 'assistant', content: 'then', thought: 'hm' }] };
    const take = (name, value) => page.setInputFiles('#import-file',
        { name, mimeType: 'application/json', buffer: Buffer.from(JSON.stringify(value)) });
    await take('old.json', old);
    await page.waitForFunction(() => chats.has('old1'));
    await page.evaluate(() => go(chats.get('old1')));
    same('what is imported is shown', await shown(page), ['before', 'then']);
    await page.evaluate(() => {
        stub.on = true;
        current.draft.files = [{ name: 'big.txt', text: 'word '.repeat(1.2e6) }];
        sendMessage(current);
    });
    await asks(page, 1);
    await say(page, 'much');
    await end(page);
    const [download] = await Promise.all([page.waitForEvent('download'), page.click('#export-all')]);
    const all = () => page.evaluate(() => recordsOf('messages', 'old1').then(list => list.map(m =>
        [m.id, m.parent, m.at, m.role, m.content, m.thought, m.end, (m.files || []).map(f => f.text.length)])));
    const saved = await download.path(), before = await all();
    check('more than 5 MB are stored', before.some(m => m[7][0] === 6e6), before);
    await page.locator('#list li').first().hover();
    await page.getByRole('button', { name: 'Delete An old one' }).click();
    await page.waitForFunction(() => !chats.size);
    await page.setInputFiles('#import-file', saved);
    await has(page, 'Imported conversations: 1.');
    same('export and import of all', await all(), before);
    const changed = { id: 'old1.1', chat: 'old1', parent: 'old1.0', at: 5.001, role: 'assistant', content: 'changed', end: 'stop' };
    await page.evaluate(put => write({ store: 'messages', remove: 'old1.0' }, { store: 'messages', put }), changed);
    await page.setInputFiles('#import-file', saved);
    await until(() => page.evaluate(() => recordsOf('messages', 'old1').then(list => list.some(m => m.content === 'before'))));
    const merged = await page.evaluate(() => recordsOf('messages', 'old1').then(list => list.map(m => m.content)));
    check('import adds what is not there and overwrites nothing', merged.includes('changed') && !merged.includes('then'), merged);
    await take('bad.json', { a: 1 });
    await has(page, 'bad.json has no conversations');
    await take('o.json', { messages: [{ role: 'system', content: 's' }, { role: 'user', content: 'plain' }] });
    await page.waitForFunction(() => [...chats.values()].some(c => c.title === 'plain'));
    passed++;
    await take('s.json', { id: 7, title: 5, messages: [{ id: 'a', parent: 'b', role: 'user', content: 'round' },
        { id: 'b', parent: 'a', role: 'assistant', content: 'and round' }] });
    await page.waitForFunction(() => chats.has('7'));
    await page.evaluate(() => go(chats.get('7')));
    same('messages that follow each other in a circle', await shown(page), ['round', 'and round']);
    for (const [name, files] of [['c.json', 5], ['d.json', [{ name: 'neither text nor a picture' }]]]) {
        await take(name, { messages: [{ role: 'user', content: 'q', files }] });
        await has(page, `${name} has no conversations`);
    }
    const blocked = await newContext();
    await blocked.addInitScript(() => { IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); }; });
    const other = await newPage(blocked);
    await has(other, 'does not let the page store');
    await exchange(other, 'q', 'still answers');
    same('without a store it works until it is closed', await shown(other), ['q', 'still answers']);
});

// ---- reading ----
await group('reading', async () => {
    const page = await newPage(await newContext());
    await stubbed(page);
    await send(page, 'q');
    await asks(page, 1);
    await page.evaluate(() => { stub.think('thinking about it'); stub.say('A paragraph of words that is long enough.\n\n'.repeat(60)); });
    await page.waitForFunction(() => document.querySelectorAll('.content p').length > 50);
    check('the end is followed', await page.evaluate(() => atEnd()) && !await page.isVisible('#down'));
    await page.evaluate(() => { $('main').scrollTop = 0; });
    await page.click('#down');
    check('a button leads to the end', await page.evaluate(() => atEnd()) && await page.locator('#down').isHidden());
    await page.evaluate(() => { $('main').scrollTop = 0; });
    await page.locator('article summary').last().click();
    await page.evaluate(() => getSelection().selectAllChildren(document.querySelector('article.assistant .content p')));
    await say(page, 'The last words');
    await page.waitForFunction(() => $('log').innerText.includes('The last words'));
    await page.evaluate(() => getSelection().setBaseAndExtent($('log').querySelector('.assistant .content').lastChild.firstChild, 4,
        $('log').querySelector('.assistant .content').lastChild.firstChild, 8));
    await say(page, ' and **more** words');
    await has(page, 'more words');
    const state = () => page.evaluate(() => [$('main').scrollTop, document.querySelector('article.assistant details').open, getSelection().toString()]);
    same('during an answer: place, thoughts, selection stay', await state(), [0, true, 'last']);
    await end(page);
    same('after it too', await state(), [0, true, 'last']);
    for (const [why, note] of [['context', 'the context is full'], ['time', 'time limit (--timeout)'], ['max_tokens', 'maximum tokens']]) {
        const n = await page.evaluate(() => stub.bodies.length);
        await tool(page, 'Regenerate').press('Enter');
        await asks(page, n + 1);
        await say(page, why);
        await end(page, 'length', why);
        check(`cut by ${why}`, (await page.innerText('article:last-of-type')).includes(note), await page.innerText('article:last-of-type'));
    }

    const lines = Array.from({ length: 4000 }, (_, i) => `const variable_${i} = compute(${i}, "some string");\n`);
    const big = { code: ['```js\n' + lines.join('') + '```', 'pre span span', 16000],
        table: ['|a|b|\n|-|-|\n' + '|x|y|\n'.repeat(5000), 'tbody tr', 5000] };
    for (const [name, [text, selector, n]] of Object.entries(big)) {
        await page.click('#new');
        const asked = await page.evaluate(() => stub.bodies.length);
        await send(page, name);
        await asks(page, asked + 1);
        const took = await page.evaluate(async ([all]) => {
            const start = performance.now(), step = Math.ceil(all.length / 300);
            let blocked = 0;
            for (let i = 0; i < all.length; i += step) {
                stub.say(all.slice(i, i + step));
                const t = performance.now();
                await new Promise(r => setTimeout(r, 4));
                blocked += performance.now() - t - 4;
            }
            stub.end();
            while (current.task) await new Promise(r => setTimeout(r, 4));
            return [Math.round(performance.now() - start), Math.round(blocked)];
        }, [text]);
        if (process.env.TIMES) console.log(name, text.length, took);
        check(`a long ${name} streams in bounded time`, took[0] < 15000, took);
        check(`a long ${name} is whole`, await page.locator(selector).count() >= n, await page.locator(selector).count());
        const again = await page.evaluate(t => {
            const start = performance.now(), to = document.createElement('div');
            document.body.append(to);
            showMarkdown(to, t);
            return to.offsetHeight && (to.remove(), performance.now() - start);
        }, text);
        if (process.env.TIMES) console.log(name, 'at once', Math.round(again));
        check(`a long ${name} at once`, again < 10000, again);
    }
});

// ---- doing ----
await group('doing', async () => {
    const context = await newContext({ permissions: ['clipboard-read', 'clipboard-write'] }), page = await newPage(context);
    await exchange(page, 'alpha question', 'the first *answer*');
    await page.locator('article').last().getByRole('button', { name: 'Copy the message' }).focus();
    await page.keyboard.press('Enter');
    check('Copy says so and keeps the focus', await saw(page, () => $('status').textContent === 'Copied') &&
        await page.evaluate(() => document.activeElement.label === 'Copy'));
    same('what is copied', await page.evaluate(() => navigator.clipboard.readText()), 'the first *answer*');
    await page.evaluate(() => { document.execCommand = () => false; });
    await page.keyboard.press('Enter');
    check('Copy that fails says so, and leaves nothing', await saw(page, () => /did not allow copying/.test($('notice').innerText)) &&
        await page.locator('body > textarea').count() === 0);

    await send(page, 'second');
    await asks(page, 2);
    await say(page, 'on its way');
    await send(page, 'queued one');
    check('a queued message waits', await page.isVisible('#queued') && (await shown(page)).length === 4);
    await page.keyboard.type('!');
    check('a change takes it out of the queue', !await page.isVisible('#queued'));
    await page.keyboard.press('Enter');
    await page.evaluate(() => stub.end());
    await asks(page, 3);
    same('it is sent when the answer is complete', await page.evaluate(() => stub.bodies[2].messages.at(-1).content), 'queued one!');
    await say(page, 'done');
    await end(page);
    const firstAddress = await page.evaluate(() => location.hash);
    check('a conversation has an address', firstAddress.length > 8);
    await page.click('#new');
    await exchange(page, 'beta question', 'zebras in the text');
    await page.fill('#search', 'ZEBRA');
    await page.waitForFunction(() => document.querySelectorAll('#list li').length === 1);
    check('search finds words in messages', (await page.innerText('#list')).includes('zebras in the text'), await page.innerText('#list'));
    same('and says how many', await page.innerText('#found'), '1 of 2 conversations');
    await page.fill('#search', '');
    await page.waitForFunction(() => document.querySelectorAll('#list li').length === 2);
    await page.goBack();
    await page.goBack();
    check('Back goes to the one before', await saw(page, h => location.hash === h && $('log').innerText.includes('alpha question'), firstAddress));
    await page.evaluate(() => { location.hash = 'nothing'; });
    check('an unknown address says so', await saw(page, () => $('notice').innerText.includes('no conversation with this address')));

    await give(page, 'drop', [['dropped.txt', 'dropped text']]);
    await has(page, 'dropped.txt');
    await give(page, 'paste', [['photo.jpg', [0xff, 0xd8, 0, 1]]]);
    await has(page, 'photo.jpg is neither UTF-8 text nor a picture');
    await page.getByRole('button', { name: 'Remove dropped.txt' }).click();
    check('a file can be removed', !(await page.innerText('#files')).includes('dropped'));

    await page.click('#open-settings');
    await page.selectOption('#preset', 'Most likely tokens');
    same('a preset', await page.inputValue('[name=temperature]'), '0');
    const numbers = { temperature: 0.5, top_k: 5, top_p: 0.5, min_p: 0.1, repeat_penalty: 1.1, presence_penalty: 0.2,
        frequency_penalty: 0.3, max_tokens: 7, seed: 3, reasoning_budget: 9 };
    for (const [name, value] of Object.entries(numbers)) await page.fill(`[name=${name}]`, String(value));
    await page.fill('[name=system]', 'Be brief.');
    await page.selectOption('[name=think]', 'off');
    await page.fill('[name=stop]', 'END\n\\n\\n');
    await page.fill('[name=logit_bias]', '{"5": -1}');
    await page.fill('[name=grammar]', 'root ::= "a"');
    await page.fill('[name=schema]', '{"type": "object"');
    await page.fill('[name=top_p]', '5');
    await page.click('#settings .main');
    check('a number that cannot be is refused', await page.isVisible('#settings'));
    await page.fill('[name=top_p]', '0.5');
    await page.click('#settings .main');
    await page.waitForFunction(() => current.settings.schema);
    await send(page, 'with settings');
    await has(page, 'JSON schema in the settings is not JSON');
    passed++;
    await page.click('#open-settings');
    await page.fill('[name=schema]', '{"type": "object"}');
    page.reply = 'mine';
    await page.click('#preset-save');
    await page.click('#settings .main');
    const asked = await page.evaluate(() => stub.bodies.length);
    await page.getByRole('button', { name: 'Try again' }).click();
    await asks(page, asked + 1);
    await say(page, 'ok');
    await end(page);
    const body = await page.evaluate(() => stub.bodies.at(-1));
    same('settings are sent', Object.fromEntries(Object.keys(numbers).map(n => [n, body[n]])), numbers);
    same('words too', [body.messages[0], body.stop, body.logit_bias, body.response_format.schema, body.grammar, body.chat_template_kwargs],
        [{ role: 'system', content: 'Be brief.' }, ['END', '\n\n'], { 5: -1 }, { type: 'object' }, 'root ::= "a"', { enable_thinking: false }]);
    await page.reload();
    await ready(page);
    await page.click('#open-settings');
    await page.selectOption('#preset', 'Server defaults');
    same('the defaults are empty fields', await page.inputValue('[name=top_k]'), '');
    await page.selectOption('#preset', 'mine');
    same('a preset of one\'s own', [await page.inputValue('[name=top_k]'), await page.inputValue('[name=schema]')], ['5', '{"type": "object"}']);
    await page.locator('#settings').getByRole('button', { name: 'Cancel' }).click();
    page.reply = 'a new name';
    await page.click('#rename');
    check('Rename', await saw(page, () => $('title').textContent === 'a new name' && $('list').innerText.includes('a new name')));
});

await group('keyboard', async () => {
    const page = await newPage(await newContext());
    await exchange(page, 'q', 'answer\n\n```js\nlet x\n```');
    const reached = new Set();
    for (let i = 0; i < 60; i++) {
        await page.keyboard.press('Tab');
        reached.add(await page.evaluate(() => {
            const n = document.activeElement;
            return n.getAttribute('aria-label') || n.textContent.trim() || n.id;
        }));
    }
    for (const name of ['Settings', 'Copy the message', 'Regenerate', 'Edit', 'Branch', 'Delete', 'Continue', 'Copy code', 'Wrap long lines', 'Send',
        'Attach files', 'New conversation', 'Search all conversations', 'Rename', 'Export', 'Export all', 'Import', 'Delete q'])
        check(`Tab reaches ${name}`, reached.has(name));
    await tool(page, 'Edit', 0).focus();
    await page.keyboard.press('Enter');
    await page.keyboard.type(' more');
    await page.keyboard.press('Enter');
    await asks(page, 2);
    await say(page, 'two');
    await page.keyboard.press('Escape');
    await idle(page);
    same('an edit, its answer and a stop by keys', [(await shown(page)), /Stopped/.test(await page.innerText('#log'))], [['q more', 'two'], true]);
});

// ---- pictures ----
if (others.length) await group('pictures', async () => {
    const dataUrl = bytes => `data:image/png;base64,${Buffer.from(bytes).toString('base64')}`;
    const context = await newContext(), page = await newPage(context, '', seeing);
    const red = await png(page, 40, 20, '#c00'), blue = await png(page, 20, 40, '#00c'), bodies = [];
    const urls = body => body.messages.map(m => (Array.isArray(m.content) ? m.content.map(p => p.image_url?.url || p.text) : m.content));
    const attached = n => page.waitForFunction(k => $('files').children.length === k, n);
    page.on('request', r => { if (r.url().endsWith('completions')) bodies.push(r.postDataJSON()); });
    await give(page, 'paste', [['image.png', red]]);
    await attached(1);
    await give(page, 'paste', [['cells.png', red]], { 'text/plain': '1\t2', 'text/html': '<td>1<td>2' });
    await give(page, 'drop', [['blue.png', blue], ['bad.png', red.slice(0, 30)], ['note.txt', 'a note']]);
    await attached(3);
    check('a file that is no picture is named', (await page.innerText('#notice')).includes('bad.png is neither'), await page.innerText('#notice'));
    await page.getByRole('button', { name: 'Remove note.txt' }).focus();
    await page.keyboard.press('Enter');
    await page.keyboard.type('What is it?');
    await page.waitForFunction(() => recordsOf('drafts', 'new').then(list => list.some(d => d.text === 'What is it?') &&
        list.some(d => d.files?.length === 2)));
    await page.reload();
    await ready(page);
    same('a reload keeps the pictures of a draft', [await page.inputValue('#input'), await page.locator('#files button').allTextContents()],
        ['What is it?', [' image.png \u00d7', ' blue.png \u00d7']]);
    await page.evaluate(() => Object.assign(current.settings, { temperature: 0, max_tokens: 4 }));
    await page.focus('#input');
    await page.keyboard.press('Enter');
    await page.waitForSelector('article.assistant');
    await idle(page);
    const sent = [[dataUrl(red), dataUrl(blue), 'What is it?']];
    same('pictures are sent as they are, before the words', urls(bodies[0]), sent);
    const metrics = await fetch(`${seeing}metrics`).then(r => r.text());
    same('the tower saw both', /^gemma4_images_total (\d+)/m.exec(metrics)?.[1], '2');
    const [, first] = await shown(page);
    const sizes = () => page.evaluate(() => [...$('log').querySelectorAll('img')].map(n => [n.alt, n.naturalWidth, n.offsetHeight]));
    same('the message shows them', await sizes(), [['image.png', 40, 192], ['blue.png', 20, 192]]);
    await page.locator('article summary').first().focus();
    await page.keyboard.press('Enter');
    same('a key shows one in its own size', await sizes(), [['image.png', 40, 20], ['blue.png', 20, 192]]);
    await give(page, 'paste', [['image.png', red]]);
    await attached(1);
    await audit(page, 'pictures in a message and in the message field');
    await page.locator('#files button').click();
    await tool(page, 'Regenerate').click();
    await has(page, '2/2');
    await idle(page);
    same('Regenerate sends them again', [urls(bodies[1]), (await shown(page))[1]], [sent, first]);
    await tool(page, 'Edit', 0).click();
    await page.locator('article').getByRole('button', { name: 'Remove image.png' }).click();
    await page.locator('article textarea').fill('And now?');
    await page.reload();
    await ready(page);
    await page.waitForSelector('article textarea');
    await page.getByRole('button', { name: 'Send as a new version' }).click();
    await page.waitForFunction(() => document.querySelectorAll('article').length === 2 && $('log').innerText.includes('2/2'));
    await idle(page);
    same('an edit keeps its pictures, also over a reload', [urls(bodies[2]), await shown(page).then(t => t[0])],
        [[[dataUrl(blue), 'And now?']], 'And now?']);

    const [download] = await Promise.all([page.waitForEvent('download'), page.click('#export')]);
    const saved = await download.path(), all = () => page.evaluate(() => recordsOf('messages', [...chats.keys()][0])
        .then(list => list.map(m => [m.content, (m.files || []).map(f => f.url)])));
    const before = await all();
    check('pictures are stored', JSON.stringify(before).includes(dataUrl(red)), before);
    await page.evaluate(() => deleteChat(current));
    await page.waitForFunction(() => !chats.size);
    await page.setInputFiles('#import-file', saved);
    await has(page, 'Imported conversations: 1.');
    same('export and import keep pictures', await all(), before);

    // what is large, or in a format that the server may not read, becomes a JPEG; a message waits for its files
    const gif = [...Buffer.from('R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7', 'base64')];
    await page.evaluate(() => { stub.on = true; });
    await page.fill('#input', 'at once');
    await give(page, 'drop', [['large.png', await png(page, 4000, 1500, '#090909')], ['dot.gif', gif]]);
    await page.keyboard.press('Enter');
    await asks(page, 1);
    const redrawn = await page.evaluate(() => Promise.all(stub.bodies[0].messages[0].content.slice(0, 2).map(async ({ image_url: { url } }) => {
        const image = Object.assign(new Image(), { src: url }), to = document.createElement('canvas').getContext('2d');
        await image.decode();
        to.drawImage(image, 0, 0);
        return [url.slice(0, 23), image.width, image.height, to.getImageData(0, 0, 1, 1).data[0]];
    })));
    same('large or of another format', redrawn, [['data:image/jpeg;base64,', 3265, 1224, 9], ['data:image/jpeg;base64,', 1, 1, 255]]);
    await say(page, 'ok');
    await end(page);

    // a server without a tower
    const blind = await newPage(context);
    await blind.fill('#input', 'my words');
    await give(blind, 'drop', [['blue.png', blue], ['note.txt', 'a note']]);
    await has(blind, 'blue.png is left out: this server was started without --mmproj');
    same('nothing else is lost', [await blind.inputValue('#input'), await texts(blind, '#files button')], ['my words', ['note.txt \u00d7']]);
    await blind.evaluate(url => { current.draft.files = [{ name: 'old.png', url }]; sendMessage(current); }, dataUrl(red));
    check('what the server says of a picture is shown', await saw(blind, () => /start the server with --mmproj/.test($('log').innerText)));
    same('and the message keeps it', await blind.locator('article img').getAttribute('alt'), 'old.png');
});

// ---- where it is served ----
await group('places', async () => {
    const context = await newContext(), paths = [], policies = [];
    await context.route(`${url}loading/`, async r => r.fulfill({ response: await r.fetch({ url }) }));
    await context.route(`${url}loading/props`, async r => r.fulfill({ response: await r.fetch({ url: `${url}props` }) }));
    await context.route(`${url}loading/props`, r => r.fulfill({ status: 503, body: '{"error":{"message":"the model is loading"}}' }),
        { times: 2 });
    await context.route(`${url}some/path/**`, async route => {          // a proxy that takes a path away
        const path = route.request().url().replace('some/path/', '');
        paths.push(path.slice(url.length));
        const response = await route.fetch({ url: path });
        policies.push(response.headers()['content-security-policy'] || '');
        await route.fulfill({ response });
    });
    const page = await newPage(context, 'some/path/');
    await page.evaluate(() => Object.assign(current.settings, { max_tokens: 5 }));
    await send(page, 'Hello');
    await page.waitForSelector('article.assistant');
    await idle(page);
    const [, answered] = await shown(page);
    check('under a path, with a policy of nonces', answered && /script-src 'nonce-/.test(policies[0]) && !/unsafe/.test(policies[0]), policies[0]);
    const early = await context.newPage();
    await early.goto(`${url}loading/`);
    await has(early, 'The server is loading the model.');
    await ready(early);
    check('a page that came before the model waits for it', await early.locator('#notice').isHidden());
    check('requests stay under the path', paths.includes('v1/chat/completions') && paths.includes('props'), paths);
});

same('no request to anywhere else', outside, []);
same('no errors in the browser\'s console', complaints, []);
await browser.close();
console.log(`# page: ${passed} passed, ${failed} failed`);
