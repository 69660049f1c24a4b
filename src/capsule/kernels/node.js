// Capsule's JavaScript kernel: runs pieces of code, one after the other, in one global scope.
//
// Started as `node -e SOURCE`; any Node from 18 on, no packages. It speaks what spec/kernel.md
// says. V8's own evaluation for consoles (replMode) lets `const`, `let` and `class` be declared
// again and takes a top-level await; a SIGINT ends it even in the middle of an endless loop.
(() => {
  'use strict';
  const fs = require('fs');
  const util = require('util');
  const vm = require('vm');
  const { Readable } = require('stream');
  const { createRequire } = require('module');
  const inspector = require('inspector');

  const PIECE = 4096 - 22;
  const LONGEST_TEXT = 1 << 20;
  const LARGEST_FORM = 4 << 20;
  const LARGEST_RESULT = 6 << 20;
  const LARGEST_JSON = 1 << 20;
  const DEEPEST = 32;
  const MIME = {
    'text/plain': 'text', 'text/html': 'html', 'text/markdown': 'markdown',
    'image/svg+xml': 'svg', 'image/png': 'png', 'image/jpeg': 'jpeg', 'text/latex': 'latex',
    'application/json': 'json', 'application/pdf': 'pdf', 'application/javascript': 'javascript',
  };
  const BINARY = ['png', 'jpeg', 'pdf'];
  const FRAMES = /\n\s+at (?:Session\.post|.*\[eval\]|.*node:inspector)[^]*$/;

  let marker = '\0';
  let run = 0;
  let interrupted = null; // rejects what the run waits for
  let own = false; // the next SIGINT is one that we sent

  const session = new inspector.Session();
  session.connect();

  function post(method, params) {
    return new Promise((resolve, reject) => {
      session.post(method, params, (error, reply) => (error ? reject(error) : resolve(reply)));
    });
  }

  // ---- the way out

  const nap = new Int32Array(new SharedArrayBuffer(4));

  function write(fd, data) {
    for (;;) {
      try {
        fs.writeSync(fd, data);
        return;
      } catch (error) {
        if (error.code !== 'EAGAIN') throw error;
        Atomics.wait(nap, 0, 0, 1); // the pipe is full; so small a write is whole or not at all
      }
    }
  }

  // A pipe's stream keeps what does not fit for later: it would come with the next run, or never.
  // Made blocking, it writes at once, and a program that only writes does not fill the memory.
  function writeAtOnce(stream) {
    const handle = stream._handle;
    if (handle && handle.setBlocking) handle.setBlocking(true);
  }

  function send(message, fd = 1) {
    const data = Buffer.from(JSON.stringify(message));
    for (let start = 0; start < data.length; start += PIECE) {
      const piece = data.subarray(start, start + PIECE);
      const first = start === 0;
      const last = start + PIECE >= data.length;
      const flag = first ? (last ? 'S' : 'B') : last ? 'E' : 'M';
      const head = marker + flag + piece.length.toString(16).padStart(4, '0');
      write(fd, Buffer.concat([Buffer.from(head, 'latin1'), piece]));
    }
  }

  // ---- values

  function textOf(text) {
    text = Buffer.from(String(text)).toString(); // without lone surrogates
    if (text.length <= LONGEST_TEXT) return text;
    const more = text.length - LONGEST_TEXT;
    return `${text.slice(0, LONGEST_TEXT)}… (${more} more characters)`;
  }

  function brief(error) {
    try {
      return textOf(error instanceof Error ? `${error.name}: ${error.message}` : error).slice(0, 1000);
    } catch {
      return '(its text cannot be had)';
    }
  }

  function clean(value, depth = 0) {
    if (value === null || value === undefined) return null;
    if (typeof value === 'boolean') return value;
    if (typeof value === 'number') return Number.isFinite(value) ? value : null;
    if (typeof value === 'string') return textOf(value);
    if (typeof value !== 'object' || depth >= DEEPEST) return textOf(value);
    if (typeof value.toJSON === 'function') return clean(value.toJSON(), depth + 1);
    if (Array.isArray(value)) return value.map((each) => clean(each, depth + 1));
    const entries = Object.entries(value).map(([key, each]) => [textOf(key), clean(each, depth + 1)]);
    return Object.fromEntries(entries);
  }

  function encoded(form, content) {
    if (content === null || content === undefined) return undefined;
    if (form === 'json') return clean(typeof content === 'string' ? JSON.parse(content) : content);
    if (content instanceof Uint8Array) {
      const bytes = Buffer.from(content);
      content = bytes.toString(BINARY.includes(form) ? 'base64' : 'utf8');
    }
    if (typeof content !== 'string') throw new TypeError(`${form} is neither text nor bytes`);
    return Buffer.from(content).toString();
  }

  // Objects offer forms as in other notebooks: a method toMime(), or $toMime(), or
  // [Symbol.for('Jupyter.display')](), which gives an object of content by MIME type.
  function bundleOf(value) {
    if (value === null || typeof value !== 'object') return {};
    const method = value[Symbol.for('Jupyter.display')] || value.$toMime || value.toMime;
    return typeof method === 'function' ? method.call(value) || {} : {};
  }

  function describe(value, main) {
    const body = { k: 'result', run, main };
    const errors = {};
    let left = LARGEST_RESULT;
    const add = (form, make) => {
      try {
        const made = make();
        if (made === undefined) return;
        const size = JSON.stringify(made).length;
        const most = form === 'json' ? LARGEST_JSON : LARGEST_FORM;
        if (size > Math.min(most, left)) {
          throw new RangeError(`too large: ${size} bytes, limit ${most}`);
        }
        left -= size;
        body[form] = made;
      } catch (error) {
        errors[form] = brief(error);
      }
    };
    add('text', () => textOf(util.inspect(value)));
    let bundle = {};
    try {
      bundle = Object.entries(bundleOf(value));
    } catch (error) {
      errors.bundle = brief(error);
      bundle = [];
    }
    for (const [type, content] of bundle) {
      if (MIME[type]) add(MIME[type], () => encoded(MIME[type], content));
    }
    if (Object.keys(errors).length) body.errors = errors;
    return body;
  }

  function report(error) {
    let name = 'Error';
    let value = '';
    let trace = '';
    try {
      const isError = error instanceof Error || util.types.isNativeError(error);
      name = isError ? String(error.name) : typeof error;
      value = isError ? String(error.message) : util.inspect(error);
      if (value.startsWith('Cannot use import statement')) value += '; use require() or await import()';
      trace = isError ? String(error.stack || error).replace(FRAMES, '') : `Uncaught ${value}`;
    } catch {
      value = '(its text cannot be had)';
    }
    send({
      k: 'error', run, name: textOf(name), value: textOf(value).slice(0, 65536),
      traceback: textOf(trace).slice(0, 262144),
    });
  }

  // ---- runs

  class Interrupted extends Error {
    constructor() {
      super('the run was interrupted');
      this.name = 'Interrupted';
      this.stack = 'Interrupted: the run was interrupted';
    }
  }

  const here = { value: undefined };

  // The value behind an inspector's reply. Its functions run where the value is, that is here.
  async function fetch(reply) {
    if (reply.objectId) {
      const functionDeclaration =
        'function () { "use strict"; globalThis[Symbol.for("capsule.kernel")].value = this; }';
      await post('Runtime.callFunctionOn', { objectId: reply.objectId, functionDeclaration });
      const value = here.value;
      here.value = undefined;
      return value;
    }
    if (reply.unserializableValue) return vm.runInThisContext(reply.unserializableValue);
    return reply.value;
  }

  function begin(code) {
    const expression = `${withImports(code)}\n//# sourceURL=run-${run}.js`;
    let reply;
    here.begin = () => {
      reply = post('Runtime.evaluate', { expression, replMode: true, awaitPromise: true });
      reply.catch(() => {});
    };
    try {
      const start = 'globalThis[Symbol.for("capsule.kernel")].begin()';
      vm.runInThisContext(start, { breakOnSigint: true });
    } catch (error) {
      throw error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED' ? new Interrupted() : error;
    }
    return reply;
  }

  // V8's consoles know no dynamic import of their own; this one does.
  function withImports(code) {
    return code.replace(/(?<![\w$.'"`])import(?=\s*\()/g, 'globalThis[Symbol.for("capsule.import")]');
  }

  async function evaluate(code) {
    const stopped = new Promise((resolve, reject) => {
      interrupted = () => reject(new Interrupted());
    });
    stopped.catch(() => {});
    const reply = await Promise.race([begin(code), stopped]);
    if (reply.exceptionDetails) {
      const thrown = reply.exceptionDetails.exception;
      throw thrown ? await fetch(thrown) : new Error(reply.exceptionDetails.text);
    }
    return Promise.race([fetch(reply.result), stopped]); // a promise is awaited on the way
  }

  async function execute(code, env) {
    let status = 'ok';
    const before = Object.keys(env).map((name) => [name, process.env[name]]);
    try {
      Object.assign(process.env, env);
      const value = await evaluate(code);
      if (value !== undefined) send(describe(value, true));
    } catch (error) {
      status = error instanceof Interrupted ? 'interrupted' : 'error';
      report(error);
    }
    interrupted = null;
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
    return { k: 'end', run, status };
  }

  // ---- requests

  const waiting = [];
  let busy = false;
  let greeted = false;

  function take(line) {
    let request;
    try {
      request = JSON.parse(line);
    } catch {
      return; // half a line, from a server that died while it wrote
    }
    if (!greeted) hello(request);
    else if (request.op === 'interrupt') return interrupt(request.run);
    else waiting.push(request);
    if (!busy) work();
  }

  // We hear of it while the run waits. Its child processes get what a terminal would send them, and so do we.
  function interrupt(number) {
    if (number !== run || !interrupted) return;
    send({ k: 'hit', run });
    own = true;
    process.kill(0, 'SIGINT');
    interrupted();
  }

  async function work() {
    busy = true;
    while (waiting.length) {
      const request = waiting.shift();
      run = request.run;
      const end = request.op === 'sync' ? { k: 'sync', run } : await execute(request.code, request.env || {});
      send({ k: end.k, run }, 2);
      send(end);
    }
    busy = false;
  }

  function hello(request) {
    greeted = true;
    marker = `\0${request.nonce}`;
    const failed = {};
    for (const name of request.imports || []) {
      try {
        globalThis.require(name);
      } catch (error) {
        failed[name] = brief(error);
      }
    }
    send({ k: 'ready', version: process.versions.node, failed });
  }

  // The pipe of requests moves to a descriptor that child processes do not inherit.
  function ownRequests() {
    let fd = 0;
    try {
      fd = fs.openSync('/proc/self/fd/0', 'r');
      fs.closeSync(0);
      fs.openSync('/dev/null', 'r');
    } catch {
      return fd;
    }
    return fd;
  }

  const requests = fs.createReadStream(null, { fd: ownRequests(), autoClose: false });
  const empty = Readable.from([]);
  empty.fd = 0;
  Object.defineProperty(process, 'stdin', { configurable: true, get: () => empty });
  Object.defineProperty(globalThis, Symbol.for('capsule.kernel'), { value: here });
  Object.defineProperty(globalThis, Symbol.for('capsule.import'), {
    value: (name) => import(name),
  });
  Object.defineProperty(globalThis, 'display', {
    configurable: true,
    writable: true,
    value: (...values) => values.forEach((value) => send(describe(value, false))),
  });
  writeAtOnce(process.stdout);
  writeAtOnce(process.stderr);
  globalThis.require = createRequire(`${process.cwd()}/`);
  process.on('SIGINT', () => {
    if (!own && interrupted) interrupted();
    own = false;
  });
  // What goes wrong after a run has ended is told, and is no reason to end the interpreter.
  const late = (error) => process.stderr.write(`Uncaught ${util.inspect(error)}\n`);
  process.on('uncaughtException', late);
  process.on('unhandledRejection', late);

  let rest = Buffer.alloc(0);
  requests.on('data', (data) => {
    rest = Buffer.concat([rest, data]);
    for (let at; (at = rest.indexOf(10)) >= 0; rest = rest.subarray(at + 1)) {
      take(rest.subarray(0, at).toString());
    }
  });
  requests.on('end', () => process.exit(0));
})();
