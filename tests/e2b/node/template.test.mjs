// Templates of npm's `e2b`: NAME is what they begin with here, IMAGE what they are built from.
import assert from 'node:assert/strict'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import { Sandbox, Template } from 'e2b'

const { NAME, IMAGE } = process.env

test('a template is built from steps, tagged, and started from', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'e2b-node-'))
  writeFileSync(join(folder, 'note.txt'), 'copied')
  const template = Template({ fileContextPath: folder })
    .fromImage(IMAGE)
    .setEnvs({ GIVEN: 'by the template' })
    .copy('note.txt', 'note.txt')
    .runCmd('cat note.txt > made && id -un >> made')
    .makeSymlink('made', 'linked')
    .runCmd('test "$(whoami)" = root', { user: 'root' })
  const said = []
  const name = `${NAME}-node`
  const built = await Template.build(template, `${name}:v1`, {
    cpuCount: 1,
    memoryMB: 256,
    onBuildLogs: (entry) => said.push(entry.message),
  })
  assert.ok(built.buildId && said.length > 0)
  assert.equal(await Template.exists(name), true)
  await Template.assignTags(`${name}:v1`, ['stable'])
  const tags = (await Template.getTags(name)).map((each) => each.tag)
  assert.deepEqual(tags.sort(), ['stable', 'v1'])
  const sandbox = await Sandbox.create(`${name}:stable`, { timeoutMs: 60_000 })
  assert.equal(await sandbox.files.read('linked'), 'copieduser\n')
  assert.equal((await sandbox.commands.run('echo $GIVEN')).stdout, 'by the template\n')
  await sandbox.kill()
  await Template.removeTags(name, ['v1', 'stable'])
  assert.equal(await Template.exists(name), false)
  const fails = Template().fromImage(IMAGE).runCmd('echo why; exit 3')
  await assert.rejects(Template.build(fails, `${NAME}-fails`), /ended with 3/)
})
