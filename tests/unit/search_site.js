// Print the pages that the search of the site finds, best first: node search_site.js WORKER INDEX QUERY...
const fs = require("fs"), vm = require("vm")
const [worker, index, ...queries] = process.argv.slice(2)
const replies = [], waiting = []
globalThis.self = globalThis
globalThis.addEventListener = (name, f) => { if (name === "message") globalThis.deliver = f }
globalThis.postMessage = m => waiting.length ? waiting.shift()(m) : replies.push(m)
globalThis.importScripts = () => {}
vm.runInThisContext(fs.readFileSync(worker, "utf8"))
const ask = m => new Promise(done => { waiting.push(done); globalThis.deliver({data: m}) })
;(async () => {
  const data = JSON.parse(fs.readFileSync(index, "utf8"))
  await ask({type: 0, data: {config: data.config, docs: data.docs, options: {suggest: false}}})
  const found = {}
  for (const q of queries) {
    const r = await ask({type: 2, data: q})
    found[q] = r.data.items.map(i => i[0].location)
  }
  console.log(JSON.stringify(found, null, 1))
})()
