// Unpacks what packing.py packed: zlib's bytes in base 85.
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";

function bytesOf(packed) {
  const [length, text] = packed.split(" ");
  const value = new Uint8Array(128);
  for (let i = 0; i < DIGITS.length; i++) value[DIGITS.charCodeAt(i)] = i;
  const made = new Uint8Array((text.length / 5) * 4);
  for (let i = 0, at = 0; i < text.length; i += 5) {
    let word = 0;
    for (let k = 0; k < 5; k++) word = word * 85 + value[text.charCodeAt(i + k)];
    made[at++] = word >>> 24;
    made[at++] = word >>> 16;
    made[at++] = word >>> 8;
    made[at++] = word;
  }
  return made.subarray(0, Number(length));
}

async function unpacked(packed) {
  const stream = new Blob([bytesOf(packed)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

const unpackedData = async () => JSON.parse(await unpacked(byId("data").textContent));

// The page's policy names the script's hash, so that the browser runs this text and no other.
async function loadCharts() {
  const script = document.createElement("script");
  script.textContent = await unpacked(byId("charts-library").textContent);
  document.head.append(script);
  if (!window.Plotly) throw new Error("the browser refused the charts' script");
}
