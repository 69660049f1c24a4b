// npm's `e2b` against a server that E2B_API_URL and E2B_SANDBOX_URL name.
import assert from 'node:assert/strict'
import http from 'node:http'
import { after, before, test } from 'node:test'
import { NotFoundError, Sandbox, TimeoutError } from 'e2b'

let sandbox
before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 120_000, metadata: { of: 'node' }, envs: { GIVEN: 'yes' } })
})
after(() => sandbox.kill())

test('a sandbox is found again, and told about', async () => {
  assert.equal(await sandbox.isRunning(), true)
  const info = await sandbox.getInfo()
  assert.equal(info.metadata.of, 'node')
  const again = await Sandbox.connect(sandbox.sandboxId)
  assert.equal((await again.commands.run('echo $GIVEN')).stdout, 'yes\n')
  const found = []
  const pages = Sandbox.list({ query: { metadata: { of: 'node' } } })
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  assert.ok(found.some((each) => each.sandboxId === sandbox.sandboxId))
  await sandbox.setTimeout(100_000)
})

test('commands: output, failure, input, time', async () => {
  const heard = []
  const ran = await sandbox.commands.run('echo out; echo err >&2; pwd', {
    onStdout: (text) => heard.push(text),
    cwd: '/tmp',
    envs: { A: '1' },
  })
  assert.equal(ran.stdout, 'out\n/tmp\n')
  assert.equal(ran.stderr, 'err\n')
  assert.equal(heard.join(''), ran.stdout)
  await assert.rejects(sandbox.commands.run('exit 3'), { name: 'CommandExitError', exitCode: 3 })
  await assert.rejects(sandbox.commands.run('sleep 30', { timeoutMs: 300 }), TimeoutError)
  const cat = await sandbox.commands.run('cat', { background: true, stdin: true })
  assert.ok((await sandbox.commands.list()).some((each) => each.pid === cat.pid))
  await sandbox.commands.sendStdin(cat.pid, 'typed')
  await sandbox.commands.closeStdin(cat.pid)
  assert.equal((await cat.wait()).stdout, 'typed')
  const long = await sandbox.commands.run('sleep 60', { background: true })
  assert.equal(await long.kill(), true)
})

test('files', async () => {
  await sandbox.files.write('folder/a ü.txt', 'text')
  assert.equal(await sandbox.files.read('folder/a ü.txt'), 'text')
  await sandbox.files.write([{ path: 'one', data: '1' }, { path: 'two', data: new Uint8Array([0, 255]).buffer }])
  assert.deepEqual([...(await sandbox.files.read('two', { format: 'bytes' }))], [0, 255])
  assert.deepEqual((await sandbox.files.list('folder')).map((each) => each.name), ['a ü.txt'])
  assert.equal(await sandbox.files.exists('nothing'), false)
  await assert.rejects(sandbox.files.read('nothing'), NotFoundError)
  await sandbox.files.rename('one', 'three')
  assert.equal((await sandbox.files.getInfo('three')).size, 1)
  assert.equal(await sandbox.files.makeDir('made'), true)
  await sandbox.files.remove('made')
  const link = await sandbox.downloadUrl('three', { useSignatureExpiration: 60_000 })
  assert.equal(await (await fetch(link)).text(), '1')
})

test('a watched folder tells of changes', async () => {
  await sandbox.files.makeDir('watched')
  let seen
  const change = new Promise((resolve) => { seen = resolve })
  const handle = await sandbox.files.watchDir('watched', (event) => seen(event))
  await sandbox.files.write('watched/new.txt', '')
  assert.equal((await change).name, 'new.txt')
  await handle.stop()
})

test('a terminal', async () => {
  let text = ''
  const terminal = await sandbox.pty.create({
    cols: 80, rows: 24, onData: (data) => { text += new TextDecoder().decode(data) },
  })
  await sandbox.pty.resize(terminal.pid, { cols: 100, rows: 30 })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
  await terminal.wait()
  assert.match(text, /30 100/)
})

// Node has no names below localhost by itself.
function get(host, path = '/') {
  return new Promise((resolve, reject) => {
    const [name, port] = host.split(':')
    const options = { host: '127.0.0.1', port, path, headers: { host } }
    http.get(options, (answer) => {
      let body = ''
      answer.on('data', (data) => { body += data })
      answer.on('end', () => resolve({ status: answer.statusCode, body, name }))
    }).on('error', reject)
  })
}

test('what listens inside is reached by its name', async () => {
  await sandbox.files.write('site/index.html', 'from inside')
  await sandbox.commands.run('python3 -m http.server 3000 --directory site', { background: true })
  let answer
  do answer = await get(sandbox.getHost(3000))
  while (answer.status === 502)
  assert.deepEqual([answer.status, answer.body], [200, 'from inside'])
})
