// Volumes of npm's `e2b`, and what is in them, against a server that E2B_VOLUME_API_URL names, too.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { after, before, test } from 'node:test'
import { Volume } from 'e2b'

let volume
before(async () => {
  volume = await Volume.create(`node-${randomUUID()}`)
})
after(() => Volume.destroy(volume.volumeId))

const missing = { name: 'VolumePathNotFoundError' }
const text = (bytes) => new TextDecoder().decode(bytes)

test('content in every form', async () => {
  const stream = new ReadableStream({
    start(out) {
      out.enqueue(new TextEncoder().encode('in '))
      out.enqueue(new TextEncoder().encode('pieces'))
      out.close()
    },
  })
  const given = { text: 'ü', bytes: new Uint8Array([0, 255]).buffer, blob: new Blob(['b']), stream, empty: '' }
  await volume.makeDir('/forms')
  for (const [name, data] of Object.entries(given)) await volume.writeFile(`/forms/${name}`, data)
  assert.equal(await volume.readFile('/forms/text'), 'ü')
  assert.deepEqual([...(await volume.readFile('/forms/bytes', { format: 'bytes' }))], [0, 255])
  assert.equal(await (await volume.readFile('/forms/blob', { format: 'blob' })).text(), 'b')
  let read = ''
  for await (const piece of await volume.readFile('/forms/stream', { format: 'stream' })) read += text(piece)
  assert.equal(read, 'in pieces')
  assert.equal(await volume.readFile('/forms/empty'), '')
})

test('folders and what is known of files', async () => {
  await volume.makeDir('/one/two', { force: true })
  await volume.writeFile('/one/file', 'some', { mode: 0o600 })
  const names = (await volume.list('/one')).map((each) => each.name)
  assert.deepEqual(names.sort(), ['file', 'two'])
  const info = await volume.getInfo('/one/file')
  assert.deepEqual([info.type, info.size, info.mode, info.uid], ['file', 4, 0o600, 1000])
  assert.ok(info.mtime instanceof Date)
  assert.equal((await volume.updateMetadata('/one/file', { mode: 0o644 })).mode, 0o644)
  await assert.rejects(volume.writeFile('/one/file', 'again', { force: false }))
  await assert.rejects(volume.makeDir('/one', { force: false }))
  await volume.remove('/one')
  assert.equal(await volume.exists('/one'), false)
  for (const call of ['readFile', 'list', 'getInfo', 'remove']) await assert.rejects(volume[call]('/none'), missing)
})
