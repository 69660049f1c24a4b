// npm's `@e2b/code-interpreter` against a server that E2B_API_URL and E2B_SANDBOX_URL name.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { NotFoundError, Sandbox, TimeoutError } from '@e2b/code-interpreter'

let sandbox
before(async () => { sandbox = await Sandbox.create({ timeoutMs: 120_000 }) })
after(() => sandbox.kill())

test('results, output and errors', async () => {
  const heard = []
  const ran = await sandbox.runCode("print('hi')\ndisplay(1)\n'two'", {
    onStdout: (message) => heard.push(message.line),
    onResult: (result) => heard.push(result.text),
  })
  assert.equal(ran.text, 'two')
  assert.deepEqual(heard, ['hi\n', '1', 'two'])
  assert.deepEqual(ran.logs.stdout, ['hi\n'])
  const failed = await sandbox.runCode('1 / 0')
  assert.equal(failed.error.name, 'ZeroDivisionError')
  assert.match(failed.error.traceback, /line 1/)
})

test('variables live on in a context, and only there', async () => {
  const context = await sandbox.createCodeContext({ cwd: '/tmp' })
  await sandbox.runCode('x = 1', { context })
  assert.equal((await sandbox.runCode('import os; x, os.getcwd()', { context })).text, "(1, '/tmp')")
  assert.equal((await sandbox.runCode('x')).error.name, 'NameError')
  assert.ok((await sandbox.listCodeContexts()).some((each) => each.id === context.id))
  await sandbox.restartCodeContext(context)
  assert.equal((await sandbox.runCode('x', { context })).error.name, 'NameError')
  await sandbox.removeCodeContext(context)
  await assert.rejects(sandbox.runCode('1', { context }), NotFoundError)
})

test('a timeout interrupts the run', async () => {
  await sandbox.runCode('kept = 1')
  const endless = sandbox.runCode('import time; time.sleep(60)', { timeoutMs: 500 })
  await assert.rejects(endless, TimeoutError)
  assert.equal((await sandbox.runCode('kept')).text, '1')
})
