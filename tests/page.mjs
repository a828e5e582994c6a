// page.mjs - the script of web/index.html without a browser: a document of plain objects, and Markdown, streams, errors and
// requests against what they have to be. Then a conversation with the server: a key, a question, an answer, another one.
//   node tests/page.mjs URL KEY
// Prints "FAILED: .." for what went wrong, and "# page: N passed, N failed".
import { readFileSync } from 'node:fs';

const [url, key] = process.argv.slice(2);
let passed = 0, failed = 0;

function check(name, ok, got) {
    if (ok) return void passed++;
    failed++;
    console.log(`FAILED: ${name}${got === undefined ? '' : `: got ${JSON.stringify(got)}`}`);
}

// ---- a document: elements with children, as much of them as the page needs ----
class Node {
    constructor(tag) { Object.assign(this, { tag, childNodes: [], attributes: {}, style: {}, value: '', hidden: false }); }
    get children() { return this.childNodes.filter(n => n instanceof Node); }
    get lastElementChild() { return this.children.at(-1); }
    get classList() { return { toggle() {}, contains: () => false }; }
    get textContent() { return this.childNodes.map(n => (n instanceof Node ? n.textContent : n)).join(''); }
    set textContent(text) { this.childNodes = text ? [String(text)] : []; }
    set innerHTML(text) { throw new Error(`innerHTML: ${text}`); }
    append(...nodes) {
        for (const n of nodes) if (n instanceof Node) n.parent = this;
        this.childNodes.push(...nodes.filter(n => n !== ''));
    }
    replaceChildren(...nodes) { this.childNodes = []; this.append(...nodes); }
    remove() { this.parent.childNodes = this.parent.childNodes.filter(n => n !== this); }
    setAttribute(name, value) { this.attributes[name] = value; }
    all() { return [this, ...this.children.flatMap(c => c.all())]; }
    querySelector(s) { return this.all().find(n => (s[0] === '.' ? n.className === s.slice(1) : n.tag === s)) || null; }
    querySelectorAll() { return []; }
    focus() {}
    select() {}
    showModal() { this.open = true; }                                   // of a dialog
    addEventListener(name, f) { this.whenClosed = f; }
    close(value) { this.open = false; this.returnValue = value; this.whenClosed(); }
}
const elements = new Map();
const element = id => elements.get(id) || elements.set(id, new Node(id)).get(id);
class Storage {
    items = new Map();
    get length() { return this.items.size; }
    key(i) { return [...this.items.keys()][i]; }
    getItem(name) { return this.items.get(name) ?? null; }
    setItem(name, value) { this.items.set(name, String(value)); }
    removeItem(name) { this.items.delete(name); }
}
const body = new Node('body');
const world = {
    document: { getElementById: element, createElement: tag => new Node(tag), body, activeElement: body, querySelector: () => null },
    localStorage: new Storage(), sessionStorage: new Storage(), navigator: {}, addEventListener() {}, matchMedia: () => ({}),
    requestAnimationFrame: f => setTimeout(f, 0), fetch: (path, options) => fetch(new URL(path, url), options), confirm: () => true,
};
const html = readFileSync('web/index.html', 'utf8'), script = html.slice(html.indexOf('<script>') + 8, html.indexOf('</script>'));
check('no way from text to HTML in the page', !/innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(/.test(script));
const known = 'showMarkdown eventReader explain requestBody readChat figures sendMessage answer deleteChat chats running';
const page = new Function(...Object.keys(world), `${script}; return { ${known.split(' ')}, now: () => current };`)(...Object.values(world));

// ---- Markdown: as the HTML that it would be ----
const brief = n => (n instanceof Node ? `<${n.tag}${n.href ? ` ${n.href}` : ''}>${n.childNodes.map(brief).join('')}</${n.tag}>` : n);
function shown(text) {
    const to = new Node('div');
    page.showMarkdown(to, text);
    return to.childNodes.map(brief).join('').replace(/<button>Copy<\/button>/g, '');
}
const code = (language, text) => `<div><div><span>${language}</span></div><pre><code>${text}</code></pre></div>`;
for (const [text, want] of [
    ['one\ntwo\n\nthree', '<p>one<br></br>two</p><p>three</p>'],
    ['# A `b`\n###### c ##\n---\n#no', '<h3>A <code>b</code></h3><h6>c</h6><hr></hr><p>#no</p>'],
    ['**b** *i* ***both*** __b__ _i_ ~~s~~', '<p><strong>b</strong> <em>i</em> <strong><em>both</em></strong> <strong>b</strong> <em>i</em> <s>s</s></p>'],
    ['2 * 3 * 4, snake_case_name, a**, \\*no\\*', '<p>2 * 3 * 4, snake_case_name, a**, *no*</p>'],
    ['`` a`b `` `**`', '<p><code>a`b</code> <code>**</code></p>'],
    ['<b>x</b><script>alert(1)</script>', '<p><b>x</b><script>alert(1)</script></p>'],
    ['[a *b*](https://x.org/a_(b)) ![i](http://x.org/i.png "t")',
        '<p><a https://x.org/a_(b)>a <em>b</em></a> <a http://x.org/i.png>i</a></p>'],
    ['[x](javascript:alert(1)) [y](data:text/html,1) [z](//x.org)', '<p>[x](javascript:alert(1)) [y](data:text/html,1) [z](//x.org)</p>'],
    ['see https://x.org/a. or <http://y.org>!', '<p>see <a https://x.org/a>https://x.org/a</a>. or <a http://y.org>http://y.org</a>!</p>'],
    ['```js now\nif (a < b)\n\n  *c*\n```\nafter', code('js', 'if (a < b)\n\n  *c*') + '<p>after</p>'],
    ['```\nnot closed\n``', code('', 'not closed\n``')],
    ['~~~\n```\n~~~', code('', '```')],
    ['- a\n- b\n  - c\n    more\n\n  d\n- [x] e\n\nend',
        '<ul><li>a</li><li>b<ul><li>c<br></br>more</li></ul><p>d</p></li><li>\u2611 e</li></ul><p>end</p>'],
    ['3. a\n   ```\n   x\n   ```\n4. b', '<ol><li>a' + code('', 'x') + '</li><li>b</li></ol>'],
    ['1. a\n\n2. b\n* c', '<ol><li>a</li><li>b</li></ol><ul><li>c</li></ul>'],
    ['> a\n> - b\nc', '<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>'],
    ['| a | b \\| c |\n|:--|--:|\n| 1 | `2` |\n| 3 |\n\nx',
        '<div><table><thead><tr><th>a</th><th>b | c</th></tr></thead><tbody><tr><td>1</td><td><code>2</code></td></tr>' +
        '<tr><td>3</td><td></td></tr></tbody></table></div><p>x</p>'],
    ['a | b\nc', '<p>a | b<br></br>c</p>'], ['', ''],
]) check(`Markdown ${JSON.stringify(text)}`, shown(text) === want, shown(text));
const whole = new Node('div');
page.showMarkdown(whole, 'a\n\nb\n\nc');
const [a, b] = whole.children;
page.showMarkdown(whole, 'a\n\nb more');
check('what is shown already stays', whole.children[0] === a && whole.children[1] !== b && whole.children.length === 2);
for (const text of ['> ', '- ', '**a ', '[', '`', '_a ', '| a ', '![a](http://x(', '``` ', '\\', 'http://(', '*a **b '])
    check(`${text.trim()} again and again`, shown(text.repeat(20000 / text.length)).length);      // what takes for ever fails the suite

// ---- streams, errors, requests ----
const stream = ': hi\n\ndata: {"a":"\u00e9"}\n\nevent: x\r\ndata: 1\r\ndata: 2\r\n\r\ndata: [DONE]\n\ndata: cut';
for (let n = 1; n < 9; n++) {
    const got = [], read = page.eventReader(data => got.push(data));
    for (let i = 0; i < stream.length; i += n) read(stream.slice(i, i + n));
    check(`events in pieces of ${n}`, JSON.stringify(got) === JSON.stringify(['{"a":"\u00e9"}', '1\n2', '[DONE]']), got);
}
check('a full context: what to do', /-c/.test(page.explain(400, { code: 'context_length_exceeded', message: '9 tokens' })));
check('a full queue: when', /3 seconds/.test(page.explain(429, null, '3')));
check('another error: as the server says it', page.explain(400, { message: 'top_p: no' }) === 'top_p: no');
check('no server', /gemma4 serve/.test(page.explain(0)));
const asked = page.requestBody({ settings: { system: 'Be brief.', temperature: 0, think: 'off', seed: 3 }, messages: [
    { role: 'user', content: 'What?', files: [{ name: 'a.md', text: '```\nx\n```\n' }] }, { role: 'assistant', content: '', error: 'no' },
    { role: 'user', content: 'Again' }] });
check('a request: its messages', JSON.stringify(asked.messages) === JSON.stringify([{ role: 'system', content: 'Be brief.' },
    { role: 'user', content: 'a.md:\n````\n```\nx\n```\n````\n\nWhat?' }, { role: 'user', content: 'Again' }]), asked.messages);
check('a request: its settings', asked.temperature === 0 && asked.seed === 3 && !asked.chat_template_kwargs.enable_thinking && !('top_k' in asked), asked);
check('what is stored and is no conversation', page.readChat('{"id":"a","messages":[1]}') === null && page.readChat('x') === null);

// ---- with the server ----
async function until(what) {
    for (let i = 0; i < 3000 && !what(); i++) await new Promise(r => setTimeout(r, 20));
    return what();
}
const form = element('key'), keyNotice = element('key-notice');
async function giveKey(text, button) {                                  // what a person does when the form is there
    await until(() => form.open);
    const said = keyNotice.textContent;
    element('key-field').value = text;
    form.close(button);
    return said;
}
check('the key is asked for', await giveKey('another', 'given') === '');
check('a wrong one: the form says so', /Wrong API key/.test(await giveKey(key, 'given')), keyNotice.textContent);
await until(() => element('model').textContent);
check('the model is named', element('model').textContent.includes('gemma4-mini'), element('notice').textContent);
check('the key is kept for this tab only', world.sessionStorage.getItem('gemma4.key') === key && !world.localStorage.length);
const chat = page.now();
Object.assign(chat.settings, { temperature: 0, max_tokens: 12 });
element('input').value = 'Tell me a story about a fox.';
page.sendMessage();
check('the log shows that an answer is waited for', element('log').textContent.includes('Waiting'), element('log').textContent);
await until(() => chat.messages[1]?.usage);
await until(() => !page.running.size);
const first = chat.messages[1] || {};
check('the answer is there', /^Once upon a time/.test(first.content) && !first.error, first);
check('it is shown', element('log').textContent.includes(first.content));
check('it is cut, and says so', /cut/.test(first.note), first.note);
check('figures', /^12 tokens, .*context \d+ of 8,192$/.test(page.figures(first)), page.figures(first));
check('it is kept', page.readChat(world.localStorage.getItem(`gemma4.chat.${chat.id}`)).messages.length === 2);
chat.messages.pop();
await page.answer(chat);
check('another one', chat.messages.length === 2 && chat.messages[1].content === first.content, chat.messages[1]);
chat.messages.pop();
chat.settings.max_tokens = 4000;
const slow = page.answer(chat);
await until(() => chat.messages[1].content);
page.running.get(chat.id).stop.abort();
await slow;
check('one that is stopped', chat.messages[1].note === 'Stopped.' && chat.messages[1].content, chat.messages[1]);
chat.messages.pop();
chat.messages[0].content = 'fox '.repeat(9000);
await page.answer(chat);
check('one that is too long: what to do', /larger context/.test(chat.messages[1].error), chat.messages[1]);
chat.messages.pop();
world.sessionStorage.removeItem('gemma4.key');
const locked = page.answer(chat);
await giveKey(key, '');
await locked;
check('a key that is not given', /requires an API key/.test(chat.messages[1].error), chat.messages[1]);
page.deleteChat(chat);
check('a conversation that is deleted', !page.chats.size && !world.localStorage.length && page.now() !== chat);

console.log(`# page: ${passed} passed, ${failed} failed`);
