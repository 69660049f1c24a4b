// Capsule's JavaScript kernel: runs pieces of code, one after the other, in one global scope.
//
// Started as `node --no-force-async-hooks-checks -e SOURCE`; any Node from 18 on, no packages. It
// speaks what spec/kernel.md says. V8's own evaluation for consoles (replMode) lets `const`, `let`
// and `class` be declared again and takes a top-level await.
//
// Code may keep this thread for ever, at once or in a callback years later. So a second thread, the
// guard, reads the requests; where an interrupt is not heard here, it stops the code as a debugger
// would. What is stopped ends without a word, with everything that called it: the state of a run is
// in `job`, and whoever comes next can go on from there.
(() => {
  'use strict';
  const fs = require('fs');
  const util = require('util');
  const vm = require('vm');
  const { Readable } = require('stream');
  const { createRequire } = require('module');
  const { Session } = require('inspector');
  const { AsyncResource } = require('async_hooks');
  const { Worker, SHARE_ENV } = require('worker_threads');
  const { setImmediate } = require('timers');
  const v8 = require('v8');

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
  const FRAMES = /\n\s+at (?:Session\.post|.*\bcapsule-kernel\b|.*node:inspector)[^]*$/;

  const asyncWrap = (() => {
    const before = process.noDeprecation;
    process.noDeprecation = true; // there is no other way to it
    try {
      return process.binding('async_wrap');
    } catch {
      return null; // a Node that has it no longer
    } finally {
      process.noDeprecation = before;
    }
  })();

  // Taken before code can replace them.
  const kill = process.kill.bind(process);
  const resolve = Promise.resolve.bind(Promise);
  const then = Function.prototype.call.bind(Promise.prototype.then);

  let marker = '\0';
  let run = 0;
  let job = null; // the run that is under way

  const isOld = parseInt(process.versions.node, 10) < 20; // its debugger dies now and then, see below

  const session = new Session();
  session.connect();

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

  const here = { value: undefined, forget };
  // The promises of runs that have not ended. V8 would tell of one that nothing refers to any more
  // in the middle of its garbage collection, of which Node dies.
  const kept = new Set();

  // The value behind an inspector's reply. Its functions run where the value is, that is here.
  function fetch(reply) {
    if (reply.objectId) {
      const functionDeclaration =
        'function () { "use strict"; globalThis[Symbol.for("capsule.kernel")].value = this; }';
      session.post('Runtime.callFunctionOn', { objectId: reply.objectId, functionDeclaration });
      session.post('Runtime.releaseObject', { objectId: reply.objectId });
      const value = here.value;
      here.value = undefined;
      return value;
    }
    if (reply.unserializableValue) return vm.runInThisContext(reply.unserializableValue);
    return reply.value;
  }

  // V8's consoles know no dynamic import of their own; this one does.
  function withImports(code) {
    return code.replace(/(?<![\w$.'"`])import(?=\s*\()/g, 'globalThis[Symbol.for("capsule.import")]');
  }

  function begin(request) {
    run = request.run;
    ignoreSignal();
    const env = request.env || {};
    const mine = { before: Object.keys(env).map((name) => [name, process.env[name]]) };
    job = mine;
    Object.assign(process.env, env);
    const expression = `${withImports(request.code)}\n//# sourceURL=run-${run}.js`;
    const how = { expression, replMode: true, awaitPromise: true };
    const stop = v8.promiseHooks.onInit((promise) => {
      kept.add(promise);
      mine.promise = promise;
      stop();
    });
    const settled = (error, reply) => {
      kept.delete(mine.promise);
      settle(mine, error, reply);
    };
    // In a scope of its own: what AsyncLocalStorage keeps there does not stay for the next run.
    const scope = new AsyncResource('run');
    scope.runInAsyncScope(() => session.post('Runtime.evaluate', how, settled));
    stop(); // code with a wrong syntax makes no promise
  }

  // What is about to be ended never leaves the scopes that it is in. Node checks that, and dies.
  function forget() {
    if (asyncWrap) asyncWrap.clearAsyncIdStack();
  }

  function settle(mine, error, reply) {
    const give = (value) => setImmediate(succeed, mine, value); // when all that need not wait is done
    const refuse = (reason) => setImmediate(fail, mine, reason);
    if (error) return refuse(new Interrupted()); // there is no other: what it runs may only throw
    if (reply.exceptionDetails) {
      const { exception, text } = reply.exceptionDetails;
      return refuse(exception ? fetch(exception) : new Error(text));
    }
    then(resolve(fetch(reply.result)), give, refuse);
  }

  function succeed(mine, value) {
    if (job !== mine) return;
    if (value !== undefined) send(describe(value, true));
    end('ok');
  }

  function fail(mine, error) {
    if (job !== mine) return;
    report(error);
    end(error instanceof Interrupted ? 'interrupted' : 'error');
  }

  function end(status) {
    for (const [name, value] of job.before) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
    job = null;
    send({ k: 'end', run }, 2);
    send({ k: 'end', run, status });
    work();
  }

  // ---- requests

  const waiting = [];
  let greeted = false;

  function take(line) {
    let request;
    try {
      request = JSON.parse(line);
    } catch {
      return; // half a line, from a server that died while it wrote
    }
    if (!greeted) hello(request);
    else if (request.op === 'interrupt') interrupt(request.run);
    else waiting.push(request);
    work();
  }

  function work() {
    while (!job && waiting.length) {
      const request = waiting.shift();
      if (request.op !== 'sync') {
        handOver(request.run);
        begin(request);
        continue;
      }
      send({ k: 'sync', run: request.run }, 2);
      send({ k: 'sync', run: request.run });
    }
  }

  function interrupt(number) {
    setImmediate(() => Atomics.add(shared, HEARD, 1)); // once nothing holds this thread
    const signalled = Atomics.exchange(shared, SIGNALLED, 0);
    if (!job || number !== run) return;
    ignoreSignal();
    if (!signalled) kill(0, 'SIGINT'); // as a terminal would; it is for child processes
    fail(job, new Interrupted());
  }

  function ignoreSignal() {
    if (!process.listeners('SIGINT').includes(nothing)) process.on('SIGINT', nothing);
  }

  function nothing() {}

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
    startGuard();
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

  const requests = ownRequests();
  let rest = Buffer.alloc(0);
  let handed = false; // it is the guard who reads

  function read() {
    const piece = Buffer.alloc(65536);
    fs.read(requests, piece, 0, piece.length, null, (error, length) => {
      if (error || length === 0) process.exit(0);
      rest = Buffer.concat([rest, piece.subarray(0, length)]);
      readLines();
    });
  }

  function readLines() {
    for (let at; !handed && (at = rest.indexOf(10)) >= 0; ) {
      const line = rest.subarray(0, at).toString();
      rest = rest.subarray(at + 1);
      take(line);
    }
    if (!handed) read();
  }

  // ---- the guard

  const HEARD = 0; // how many interrupts this thread has heard
  const SIGNALLED = 1; // child processes have got the one that comes
  const shared = new Int32Array(new SharedArrayBuffer(8));
  let guard = null;

  function startGuard() {
    if (isOld) v8.setFlagsFromString('--no-sparkplug'); // of functions that this has compiled
    const workerData = { shared, HEARD, SIGNALLED, isOld };
    try {
      guard = new Worker(`(${watch})()`, { eval: true, env: SHARE_ENV, execArgv: [], workerData });
    } catch {
      return; // no thread is to be had: we can be interrupted while we wait, and only then
    }
    guard.on('message', (line) => (line === null ? process.exit(0) : take(line)));
    guard.on('error', () => {
      guard = null;
      if (handed) read();
      handed = false;
    });
  }

  function handOver(last) {
    if (handed || !guard || !requests) return;
    const fd = fs.openSync(`/proc/self/fd/${requests}`, 'r'); // the guard's own
    guard.postMessage({ fd, rest, last });
    rest = Buffer.alloc(0);
    handed = true;
  }

  // Runs in a thread of its own, and so sees nothing of what is around it.
  function watch() {
    const { parentPort, workerData } = require('worker_threads');
    const { Session } = require('inspector');
    const { Socket } = require('net');

    const SOON = 20; // milliseconds within which an interrupt is heard, if nothing keeps the thread
    const LATE = 1000; // milliseconds after which it is ended where nobody can see
    const REQUEST = /^\s*\{"op":\s*"(run|interrupt)",\s*"run":\s*(\d+)/;
    const MOST_STEPS = 500;
    const FORGET = 'globalThis[Symbol.for("capsule.kernel")].forget()';

    const { shared, HEARD, SIGNALLED, isOld } = workerData;
    const isDeaf = () => Atomics.load(shared, HEARD) < told;
    const held = [];
    let told = 0;
    let session = null;
    let last = 0; // the run that was asked for
    let urgent = null; // the interrupt that is to be heard before anything else is passed on

    parentPort.once('message', ({ fd, rest, last: begun }) => {
      const pipe = new Socket({ fd, readable: true, writable: false });
      last = begun;
      const feed = (data) => {
        rest = Buffer.concat([rest, data]);
        for (let at; (at = rest.indexOf(10)) >= 0; rest = rest.subarray(at + 1)) {
          take(rest.subarray(0, at).toString());
        }
      };
      feed(Buffer.alloc(0));
      pipe.on('data', feed);
      pipe.on('end', () => parentPort.postMessage(null));
    });

    // What is asked for after an interrupt waits until that is heard: it must not be hit.
    function take(line) {
      if (line === urgent) {
        signal(); // a child process may have come in between
      } else if (urgent !== null) {
        held.push(line);
      } else {
        parentPort.postMessage(line);
        const [, op, number] = REQUEST.exec(line) || [];
        if (op === 'run') last = number;
        else if (op === 'interrupt' && number === String(last)) follow(line);
      }
    }

    function signal() {
      Atomics.store(shared, SIGNALLED, 1);
      process.kill(0, 'SIGINT');
    }

    function follow(line) {
      const since = Date.now();
      let giveUp = null;
      urgent = line;
      told += 1;
      const timer = setInterval(() => {
        if (isDeaf()) {
          if (!giveUp && Date.now() - since > SOON) giveUp = hunt();
          return;
        }
        clearInterval(timer);
        if (giveUp) giveUp();
        Atomics.store(shared, SIGNALLED, 0);
        urgent = null;
        while (held.length && urgent === null) take(held.shift());
      }, 1);
    }

    // The thread is stopped as by a debugger, and code that is neither ours nor Node's is ended where
    // it is; if that was not enough (it has had itself called again, by nextTick say), where it
    // begins. Node's own functions, and ours, are let go on to their end: a stream that is stopped
    // while it writes would never write again.
    function hunt() {
      signal(); // it may wait for a child process
      const urls = new Map();
      const isKernel = ({ location }) => urls.get(location.scriptId) === 'capsule-kernel.js';
      const isTheirs = (frame) =>
        !isKernel(frame) && !/^node:/.test(urls.get(frame.location.scriptId));
      let seen = Date.now();
      let shots = 0;
      let steps = 0;
      let entered = false;
      let timer = null;

      const pause = () => {
        session.post('Debugger.setSkipAllPauses', { skip: false });
        session.post('Debugger.pause');
        if (Date.now() - seen > LATE) end();
      };
      const end = () => {
        session.post('Debugger.setSkipAllPauses', { skip: true }); // also one that was asked for
        session.post('Runtime.evaluate', { expression: FORGET });
        session.post('Runtime.terminateExecution');
      };
      const goOn = (wait) => {
        session.post('Debugger.resume');
        timer = setInterval(pause, wait); // more than once: one that comes too early is not heard
      };
      const step = (how, wait) => {
        steps += 1;
        entered = how === 'stepInto';
        session.post(`Debugger.${how}`);
        timer = setInterval(() => {
          steps = MOST_STEPS; // it does not come to an end
          pause();
        }, wait);
      };
      const look = ({ params: { callFrames } }) => {
        clearInterval(timer);
        seen = Date.now();
        const theirs = callFrames.findIndex(isTheirs);
        const patient = steps < MOST_STEPS;
        const sends = callFrames.slice(0, theirs).some(isKernel);
        if (!isDeaf()) goOn(1);
        else if (theirs < 0) shots && patient ? step('stepInto', 50) : goOn(1);
        else if (theirs > 0 && (patient || sends)) step('stepOut', 500);
        else if (patient && shots && !entered) step('stepOut', 50);
        else {
          end();
          goOn(50);
          shots += 1;
          steps = 0;
          entered = false;
        }
      };

      if (!session) {
        session = new Session();
        session.connectToMainThread();
      }
      session.on('Debugger.scriptParsed', ({ params }) => urls.set(params.scriptId, params.url));
      session.on('Debugger.paused', look);
      session.post('Debugger.enable');
      pause();
      timer = setInterval(pause, 50);
      return () => {
        clearInterval(timer);
        session.removeAllListeners();
        session.post('Debugger.disable');
        if (isOld) return; // of a session that ends
        session.disconnect();
        session = null;
      };
    }
  }

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
  // What goes wrong after a run has ended is told, and is no reason to end the interpreter.
  const late = (error) => process.stderr.write(`Uncaught ${util.inspect(error)}\n`);
  process.on('uncaughtException', late);
  process.on('unhandledRejection', late);
  read();
})();
//# sourceURL=capsule-kernel.js
